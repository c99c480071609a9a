"""Fetch the T15 data set of Card et al. 2024 from Dryad and unpack it.

    python download_data.py                      # the neural data, into data/ beside this script
    python download_data.py --pretrained         # the reference decoder's checkpoint too
    python download_data.py --data_dir /big/disk

An interrupted download is continued. Dryad asks for an access token before it hands out files: put one into the
environment variable DRYAD_TOKEN, or download the archives in a browser, place them in the data directory and run this
again: it unpacks what it finds there.
"""

import argparse
import hashlib
import json
import os
import shutil
import stat
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from tqdm import tqdm

HERE = Path(__file__).resolve().parent
DOI = "doi:10.5061/dryad.dncjsxm85"
PAGE = "https://doi.org/10.5061/dryad.dncjsxm85"
API_URL = "https://datadryad.org/api/v2"
NEURAL_DATA = "t15_copyTask_neuralData.zip"
PRETRAINED = "t15_pretrained_rnn_baseline.zip"
CHUNK = 1 << 20  # bytes
RETRIES = 5  # without a byte of progress between them
TIMEOUT = 60  # seconds without an answer
NETWORK_ERRORS = (urllib.error.URLError, HTTPException, OSError)


class DownloadError(RuntimeError):
    """What could not be fetched or unpacked, and why."""


@dataclass(frozen=True)
class RemoteFile:
    """A file of the data set; digest is empty where Dryad gives none."""

    name: str
    size: int
    url: str
    digest: str = ""
    digest_type: str = ""


# ---- the list of files


def list_files(api_url: str = API_URL, doi: str = DOI) -> dict[str, RemoteFile]:
    """The files of the data set's latest version, by name.

    Raises:
        DownloadError: no network, or an answer that is not understood.
    """
    try:
        versions = _get_json(f"{api_url}/datasets/{urllib.parse.quote(doi, safe='')}/versions")
        link = versions["_embedded"]["stash:versions"][-1]["_links"]["stash:files"]["href"]
        files = {}
        while link:
            page_url = urllib.parse.urljoin(api_url, link)
            page = _get_json(page_url)
            for entry in page["_embedded"]["stash:files"]:
                files[entry["path"]] = RemoteFile(
                    entry["path"],
                    int(entry["size"]),
                    urllib.parse.urljoin(page_url, entry["_links"]["stash:download"]["href"]),
                    entry.get("digest") or "",
                    entry.get("digestType") or "",
                )
            link = page["_links"].get("next", {}).get("href")
    except NETWORK_ERRORS as error:
        raise DownloadError(f"the list of files at {api_url} cannot be read: {_words(error)}") from error
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DownloadError(f"the list of files at {api_url} is not what was expected: {error!r}") from error
    return files


def _get_json(url: str) -> dict:
    # No token here: Dryad lists files to everybody, and refuses the list itself to an expired token.
    with urllib.request.urlopen(_request(url), timeout=TIMEOUT) as response:
        return json.load(response)


def _request(url: str, start: int = 0, token: str = "") -> urllib.request.Request:
    request = urllib.request.Request(url, headers={"User-Agent": "b2txt download_data.py"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    if token:  # not sent on to the storage that Dryad redirects to
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return request


def _words(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    return str(getattr(error, "reason", "") or error or type(error).__name__)


# ---- downloading


def download(file: RemoteFile, directory: Path, token: str = "", wait: float = 2.0) -> Path:
    """Fetch a file, going on where an earlier try ended, and check its size and digest.

    Args:
        directory: gets `<name>.part` while the download lasts, and `<name>` when it is complete.
        token: of the Dryad API, if there is one.
        wait: seconds before the first try after a failure; doubled with each further one.
    Returns:
        the file.
    Raises:
        DownloadError: refused, broken off again and again, or not the file that was announced.
    """
    target, part = directory / file.name, directory / f"{file.name}.part"
    if part.exists() and part.stat().st_size > file.size:
        part.unlink()
    failures = 0
    with _bar(file.name, file.size) as bar:
        while (start := _size(part)) < file.size:
            try:
                bar.update(start - bar.n)
                _fetch(file, part, start, token, bar)
                reason = "the connection was closed early"
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code != 429:
                    raise DownloadError(f"{file.name}: {_words(error)}") from error
                reason = _words(error)
            except NETWORK_ERRORS as error:
                reason = _words(error)
            failures = 0 if _size(part) > start else failures + 1
            if failures == RETRIES:
                raise DownloadError(
                    f"{file.name}: {reason}; {_size(part):,} of {file.size:,} bytes are there, run this again to go on"
                )
            if failures:
                time.sleep(wait * 2 ** (failures - 1))
        bar.update(_size(part) - bar.n)
    _check_content(part, file)
    os.replace(part, target)
    return target


def _fetch(file: RemoteFile, part: Path, start: int, token: str, bar: tqdm) -> None:
    """Append to the part from byte `start` on, or write it anew where the server does not serve parts."""
    with urllib.request.urlopen(_request(file.url, start, token), timeout=TIMEOUT) as response:
        length, content_range = response.headers.get("Content-Length"), response.headers.get("Content-Range", "")
        go_on = response.status == 206 and content_range.startswith(f"bytes {start}-")
        kind = response.headers.get_content_type()
        if kind == "text/html" or (not go_on and length and int(length) != file.size):
            raise DownloadError(f"{file.name}: the server sends something else ({kind}, {length or 'unknown'} bytes)")
        with open(part, "ab" if go_on else "wb") as output:
            if not go_on:
                bar.reset()
            while chunk := response.read(CHUNK):
                output.write(chunk)
                bar.update(len(chunk))


def _check_content(part: Path, file: RemoteFile) -> None:
    """Size and digest; a wrong part is removed, since going on with it leads nowhere."""
    problem = ""
    if part.stat().st_size != file.size:
        problem = f"{part.stat().st_size:,} bytes in place of {file.size:,}"
    algorithm = file.digest_type.lower().replace("-", "")
    if not problem and file.digest and algorithm in hashlib.algorithms_available:
        with open(part, "rb") as content:
            if hashlib.file_digest(content, algorithm).hexdigest() != file.digest.lower():
                problem = f"its {file.digest_type} digest is not the one that Dryad gives"
    if problem:
        part.unlink()
        raise DownloadError(f"{file.name}: {problem}; it was removed, run this again")


def _bar(name: str, size: int) -> tqdm:
    return tqdm(total=size, desc=name, unit="B", unit_scale=True, unit_divisor=1024, mininterval=0.5)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# ---- unpacking


def unpack(archive: Path, directory: Path) -> int:
    """Unpack a zip archive, leaving out what is unpacked already. Returns the number of files written.

    Raises:
        DownloadError: no zip archive, a damaged one, one that would write outside the directory, or no space;
            files that were written before stay.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            entries = [entry for entry in file.infolist() if not entry.is_dir() and not _is_litter(entry.filename)]
            for entry in entries:
                _check_entry(archive, entry)
            missing = [entry for entry in entries if not _is_there(directory / entry.filename, entry.file_size)]
            need = sum(entry.file_size for entry in missing)
            check_space(directory, need, f"unpack {archive.name}")
            with _bar(f"unpacking {archive.name}", need) as bar:
                for entry in missing:
                    _extract(file, entry, directory / entry.filename, bar)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DownloadError(f"{archive}: not a readable zip archive ({error}); remove it and run this again") from error
    manifest = {entry.filename: entry.file_size for entry in entries}
    _manifest(archive, directory).write_text(json.dumps(manifest, indent=1) + "\n")
    return len(missing)


def is_unpacked(name: str, directory: Path) -> bool:
    """Whether the archive's files are there, also where the archive itself has been removed since."""
    try:
        manifest = json.loads(_manifest(Path(name), directory).read_text())
    except (OSError, ValueError):
        return False
    return all(_is_there(directory / path, size) for path, size in manifest.items())


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _manifest(archive: Path, directory: Path) -> Path:
    return directory / f".{archive.name}.unpacked"


def _is_litter(name: str) -> bool:
    return name.startswith("__MACOSX/") or name.endswith(".DS_Store")


def _check_entry(archive: Path, entry: zipfile.ZipInfo) -> None:
    path = PurePosixPath(entry.filename)
    link = stat.S_ISLNK(entry.external_attr >> 16)
    if link or path.is_absolute() or ".." in path.parts or "\\" in entry.filename or ":" in path.parts[0]:
        raise DownloadError(f"{archive}: holds {entry.filename!r}, which may lie outside the data directory")


def _extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, bar: tqdm) -> None:
    """Write one file under another name and rename it, so that a kill leaves no half file behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    with archive.open(entry) as source, open(part, "wb") as output:  # reading checks the CRC
        while chunk := source.read(CHUNK):
            output.write(chunk)
            bar.update(len(chunk))
    os.replace(part, target)


def check_space(directory: Path, need: int, what_for: str) -> None:
    """Raise a DownloadError where the disk is too small."""
    free = shutil.disk_usage(directory).free
    if need > free:
        raise DownloadError(
            f"{directory}: to {what_for} {need / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free; "
            "make room, or choose another --data_dir"
        )


# ---- the command


def manual_steps(names: list[str], directory: Path) -> str:
    """What to do where the download does not work."""
    return (
        "By hand:\n"
        f"  1. open {PAGE} in a browser\n"
        f"  2. download {' and '.join(names)}\n"
        f"  3. put {'it' if len(names) == 1 else 'them'} into {directory}\n"
        "  4. run this command again: it unpacks what it finds there\n"
        "Or set DRYAD_TOKEN to an access token of a Dryad account (https://datadryad.org/account) and run this again.\n"
        "Without the data: ./quickstart.sh trains on a simulated data set."
    )


def fetch_all(names: list[str], directory: Path, api_url: str, token: str = "") -> None:
    """Download and unpack the archives that are not there yet.

    Raises:
        DownloadError
    """
    wanted = [name for name in names if not is_unpacked(name, directory)]
    absent = [name for name in wanted if not (directory / name).exists()]
    if absent:
        files = list_files(api_url)
        unknown = [name for name in absent if name not in files]
        if unknown:
            raise DownloadError(f"Dryad lists no {', '.join(unknown)}, but {', '.join(sorted(files)) or 'nothing'}")
        left = sum(files[name].size - min(_size(directory / f"{name}.part"), files[name].size) for name in absent)
        unpacked = sum(files[name].size for name in absent)  # at least: the archives are compressed
        check_space(directory, left + unpacked, f"download and unpack {', '.join(absent)}")
        for name in absent:
            download(files[name], directory, token)
    for name in names:
        if name in wanted:
            count = unpack(directory / name, directory)
            print(f"{name}: {count} files unpacked into {directory}; the archive can be removed")
        else:
            print(f"{name}: unpacked already")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--pretrained", action="store_true", help="fetch the reference decoder's checkpoint too")
    parser.add_argument("--data_dir", type=Path, default=HERE / "data", help="default: data beside this script")
    parser.add_argument("--api_url", default=API_URL, help="default: %(default)s")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Fetch, unpack, say where the data lie. Returns the exit code."""
    options = parse_arguments(arguments)
    names = [NEURAL_DATA] + ([PRETRAINED] if options.pretrained else [])
    directory = options.data_dir.expanduser().resolve()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        fetch_all(names, directory, options.api_url, os.environ.get("DRYAD_TOKEN", ""))
    except DownloadError as error:
        print(f"{error}\n\n{manual_steps(names, directory)}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{directory}: {error}", file=sys.stderr)
        return 1
    print(f"the data lie in {directory / 'hdf5_data_final'} (dataset.dataset_dir, --data_dir of the other commands)")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\ninterrupted; run this again to go on")
