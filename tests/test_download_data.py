"""download_data.py against a small server on this machine that answers as Dryad's API does."""

import hashlib
import io
import json
import stat
import threading
import urllib.parse
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import download_data
from download_data import (
    NEURAL_DATA,
    PRETRAINED,
    DownloadError,
    RemoteFile,
    download,
    is_unpacked,
    list_files,
    main,
    unpack,
)


def zip_bytes(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


SESSION = "hdf5_data_final/t15.2023.08.13"
NEURAL_FILES = {
    f"{SESSION}/data_train.hdf5": bytes(range(256)) * 900,
    f"{SESSION}/data_val.hdf5": b"val" * 10,
    f"{SESSION}/empty.hdf5": b"",
    "__MACOSX/litter": b"x",
}
ARCHIVES = {
    NEURAL_DATA: zip_bytes(NEURAL_FILES),
    PRETRAINED: zip_bytes({"t15_pretrained_rnn_baseline/checkpoint/args.yaml": b"mode: train\n"}),
}


class Dryad(ThreadingHTTPServer):
    """Serves ARCHIVES; every request for a file is noted as (name, Range header, Authorization header)."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str | None, str | None]] = []
        self.cut_after: int | None = None  # bytes sent before the connection is closed, once
        self.ranges = True
        self.status = 0  # to answer to every request for a file
        self.html = False
        self.digests = {name: hashlib.sha256(data).hexdigest() for name, data in ARCHIVES.items()}
        self.api_url = f"http://127.0.0.1:{self.server_port}/api/v2"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server, path = self.server, urllib.parse.urlsplit(self.path)
        if path.path == f"/api/v2/datasets/{urllib.parse.quote(download_data.DOI, safe='')}/versions":
            links = [{"_links": {"stash:files": {"href": f"/api/v2/versions/{n}/files"}}} for n in (1, 2)]
            self.send_json({"_embedded": {"stash:versions": links}})
        elif path.path == "/api/v2/versions/2/files":  # the latest version, a file a page
            self.send_page(int(urllib.parse.parse_qs(path.query).get("page", ["1"])[0]))
        elif path.path.startswith("/api/v2/files/"):
            name = path.path.split("/")[-2]
            server.requests.append((name, self.headers.get("Range"), self.headers.get("Authorization")))
            if server.status:
                self.send_error(server.status)
            else:  # Dryad redirects to its storage
                self.send_response(302)
                self.send_header("Location", f"http://localhost:{server.server_port}/storage/{name}")
                self.send_header("Content-Length", "0")
                self.end_headers()
        elif path.path.startswith("/storage/"):
            assert self.headers.get("Authorization") is None, "the token was passed on"
            self.send_archive(ARCHIVES[path.path.split("/")[-1]])
        else:
            self.send_error(404)

    def send_json(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_page(self, number):
        name = list(ARCHIVES)[number - 1]
        entry = {
            "path": name,
            "size": len(ARCHIVES[name]),
            "digest": self.server.digests[name],
            "digestType": "sha-256",
            "_links": {"stash:download": {"href": f"/api/v2/files/{name}/download"}},
        }
        links = {"next": {"href": f"/api/v2/versions/2/files?page={number + 1}"}} if number < len(ARCHIVES) else {}
        self.send_json({"_embedded": {"stash:files": [entry]}, "_links": links})

    def send_archive(self, data):
        server, start = self.server, 0
        if server.html:
            data = b"<html>are you a robot?</html>"
        wanted = self.headers.get("Range")
        if wanted and server.ranges and not server.html:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Type", "text/html" if server.html else "application/zip")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        end = len(data) if server.cut_after is None else min(start + server.cut_after, len(data))
        server.cut_after = None
        self.wfile.write(data[start:end])
        self.close_connection = True


@pytest.fixture
def dryad():
    server = Dryad()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("DRYAD_TOKEN", raising=False)


def run(dryad, directory: Path, *options: str) -> int:
    return main(["--data_dir", str(directory), "--api_url", dryad.api_url, *options])


def neural_file(dryad) -> RemoteFile:
    return list_files(dryad.api_url)[NEURAL_DATA]


def test_downloads_and_unpacks(dryad, tmp_path, capsys):
    assert run(dryad, tmp_path, "--pretrained") == 0
    for name, data in NEURAL_FILES.items():
        assert name.startswith("__MACOSX") or (tmp_path / name).read_bytes() == data
    assert not (tmp_path / "__MACOSX").exists() and not list(tmp_path.rglob("*.part"))
    assert (tmp_path / "t15_pretrained_rnn_baseline/checkpoint/args.yaml").exists()
    assert str(tmp_path / "hdf5_data_final") in capsys.readouterr().out


def test_fetches_the_neural_data_alone_unless_asked(dryad, tmp_path):
    assert run(dryad, tmp_path) == 0
    assert [request[0] for request in dryad.requests] == [NEURAL_DATA]


def test_second_run_does_nothing_even_without_the_archive(dryad, tmp_path, capsys):
    run(dryad, tmp_path)
    (tmp_path / NEURAL_DATA).unlink()
    dryad.requests.clear()
    assert run(dryad, tmp_path) == 0 and not dryad.requests
    assert "unpacked already" in capsys.readouterr().out


def test_a_file_lost_after_unpacking_is_unpacked_again(dryad, tmp_path):
    run(dryad, tmp_path)
    (tmp_path / SESSION / "data_val.hdf5").unlink()
    kept = (tmp_path / SESSION / "data_train.hdf5").stat().st_mtime_ns
    assert not is_unpacked(NEURAL_DATA, tmp_path)
    assert unpack(tmp_path / NEURAL_DATA, tmp_path) == 1
    assert (tmp_path / SESSION / "data_train.hdf5").stat().st_mtime_ns == kept


def test_goes_on_after_a_broken_connection(dryad, tmp_path):
    dryad.cut_after = 1000
    path = download(neural_file(dryad), tmp_path, wait=0)
    assert path.read_bytes() == ARCHIVES[NEURAL_DATA]
    assert [request[1] for request in dryad.requests] == [None, "bytes=1000-"]


def test_goes_on_where_an_earlier_run_ended(dryad, tmp_path):
    (tmp_path / f"{NEURAL_DATA}.part").write_bytes(ARCHIVES[NEURAL_DATA][:777])
    assert download(neural_file(dryad), tmp_path).read_bytes() == ARCHIVES[NEURAL_DATA]
    assert [request[1] for request in dryad.requests] == ["bytes=777-"]


def test_starts_anew_where_the_server_serves_no_parts(dryad, tmp_path):
    dryad.ranges = False
    (tmp_path / f"{NEURAL_DATA}.part").write_bytes(b"x" * 777)
    assert download(neural_file(dryad), tmp_path).read_bytes() == ARCHIVES[NEURAL_DATA]


def test_a_part_that_is_too_long_is_not_used(dryad, tmp_path):
    (tmp_path / f"{NEURAL_DATA}.part").write_bytes(b"x" * (len(ARCHIVES[NEURAL_DATA]) + 1))
    assert download(neural_file(dryad), tmp_path).read_bytes() == ARCHIVES[NEURAL_DATA]


def test_a_wrong_digest_is_found_and_the_file_removed(dryad, tmp_path):
    dryad.digests[NEURAL_DATA] = "0" * 64
    with pytest.raises(DownloadError, match="its sha-256 digest is not the one that Dryad gives"):
        download(neural_file(dryad), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_page_in_place_of_the_file_is_no_part_of_it(dryad, tmp_path):
    dryad.html = True
    with pytest.raises(DownloadError, match="the server sends something else"):
        download(neural_file(dryad), tmp_path)
    assert not list(tmp_path.iterdir())


def test_gives_up_after_failures_without_progress_and_keeps_the_part(dryad, tmp_path, monkeypatch):
    dryad.status = 503
    (tmp_path / f"{NEURAL_DATA}.part").write_bytes(ARCHIVES[NEURAL_DATA][:10])
    with pytest.raises(DownloadError, match=r"answers 503 .*; 10 of [\d,]+ bytes are there, run this again to go on"):
        download(neural_file(dryad), tmp_path, wait=0)
    assert len(dryad.requests) == download_data.RETRIES
    assert (tmp_path / f"{NEURAL_DATA}.part").stat().st_size == 10


@pytest.mark.parametrize("status", [401, 403, 404])
def test_refusal_leads_to_the_manual_steps_and_they_work(dryad, tmp_path, capsys, status):
    dryad.status = status
    assert run(dryad, tmp_path, "--pretrained") == 1
    message = capsys.readouterr().err
    for words in (f"answers {status}", download_data.PAGE, NEURAL_DATA, PRETRAINED, str(tmp_path), "DRYAD_TOKEN"):
        assert words in message
    for name, data in ARCHIVES.items():  # as a user does it
        (tmp_path / name).write_bytes(data)
    dryad.requests.clear()
    assert run(dryad, tmp_path, "--pretrained") == 0 and not dryad.requests
    assert (tmp_path / SESSION / "data_train.hdf5").exists()


def test_the_token_goes_to_dryad_and_not_to_its_storage(dryad, tmp_path, monkeypatch):
    monkeypatch.setenv("DRYAD_TOKEN", "secret")
    assert run(dryad, tmp_path) == 0
    assert dryad.requests == [(NEURAL_DATA, None, "Bearer secret")]


def test_no_network(tmp_path, capsys):
    assert main(["--data_dir", str(tmp_path), "--api_url", "http://127.0.0.1:9/api/v2"]) == 1
    message = capsys.readouterr().err
    assert "cannot be read: " in message and "By hand:" in message


def test_an_answer_that_is_not_understood(dryad, tmp_path, monkeypatch):
    with pytest.raises(DownloadError, match="answers 404"):
        list_files(dryad.api_url, "doi:10.5061/another")
    send_json = Handler.send_json
    monkeypatch.setattr(Handler, "send_json", lambda self, _: send_json(self, []))
    with pytest.raises(DownloadError, match="not what was expected"):
        list_files(dryad.api_url)


def test_disk_space_is_checked_before_the_download(dryad, tmp_path, monkeypatch, capsys):
    usage = type("usage", (), {"free": 10})
    monkeypatch.setattr(download_data.shutil, "disk_usage", lambda _: usage)
    assert run(dryad, tmp_path) == 1 and not dryad.requests
    assert "make room, or choose another --data_dir" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/../../outside", "a\\..\\outside", "C:/outside"])
def test_nothing_is_unpacked_outside(tmp_path, name):
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("good", b"1")
        entry = zipfile.ZipInfo("placeholder")
        entry.filename = name
        file.writestr(entry, b"2")
    with pytest.raises(DownloadError, match="may lie outside"):
        unpack(archive, tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def test_links_are_refused(tmp_path):
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as file:
        entry = zipfile.ZipInfo("link")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(entry, "/etc/passwd")
    with pytest.raises(DownloadError, match="may lie outside"):
        unpack(archive, tmp_path)


def test_a_damaged_archive_is_named(tmp_path):
    archive = tmp_path / "a.zip"
    archive.write_bytes(b"not a zip")
    with pytest.raises(DownloadError, match=r"a\.zip: not a readable zip archive"):
        unpack(archive, tmp_path)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(archive, "w", method) as file:
            file.writestr("x", bytes(range(200)) * 5)
        damaged = bytearray(archive.read_bytes())
        for position in range(60, 80):
            damaged[position] ^= 0xFF
        archive.write_bytes(bytes(damaged))
        with pytest.raises(DownloadError, match=r"a\.zip: not a readable zip archive"):
            unpack(archive, tmp_path)
        assert not (tmp_path / "x").exists() and not is_unpacked("a.zip", tmp_path)
