"""The benchmarks' own parts: ratios, the noise set, the table, and that run_all.py says when a bar is missed."""

import json
import sys
from pathlib import Path

import h5py
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import paired
import run_all

from dataset_index import index_splits

ROOT = Path(__file__).resolve().parent.parent
RATIO = {"min": 1.0, "median": 2.0, "max": 3.5}


def test_ways_are_timed_in_turn():
    calls = []
    found = paired.in_turn([lambda: calls.append("a") or 1.0, lambda: calls.append("b") or 2.0], 3, "test")
    assert calls == list("ababab") and found == [(1.0, 2.0)] * 3
    assert paired.spread([3.0, 1.0, 2.0]) == {"min": 1.0, "median": 2.0, "max": 3.0}
    assert paired.in_words(RATIO, 1) == "2.0 (1.0 to 3.5)"


def test_the_noise_is_a_data_set_that_can_be_trained_on(tmp_path, monkeypatch):
    monkeypatch.setenv("B2TXT_CACHE_DIR", str(tmp_path / "cache"))
    root = paired.write_noise(tmp_path / "noise", 3, {"train": 4, "val": 2}, lengths=(60, 80, 120))
    splits = index_splits(paired.config_for("rnn_args_original.yaml", root), ("train", "val"))
    assert [len(trials) for trials in splits.values()] == [12, 6]
    assert all(60 <= trial.n_time_steps <= 120 and trial.offset for trial in splits["train"])
    with h5py.File(splits["val"][0].path) as file:
        assert abs(file["trial_0000"]["input_features"][()].std() - 1) < 0.05


def fake_benchmark(folder, status, ratios):
    """A script that writes such ratios and ends with such a status."""
    script = folder / "bench_fake.py"
    script.write_text(
        "import json, pathlib, sys\n"
        f"pathlib.Path(sys.argv[sys.argv.index('--json') + 1]).write_text(json.dumps({{'ratios': {ratios!r}}}))\n"
        f"sys.exit({status})\n"
    )
    return script


@pytest.mark.parametrize("status", [0, 1])
def test_all_ratios_come_into_one_file_and_the_table_into_its_place(tmp_path, monkeypatch, capsys, status):
    monkeypatch.setattr(run_all, "HERE", fake_benchmark(tmp_path, status, {"fake": RATIO}).parent)
    monkeypatch.setattr(run_all, "BENCHMARKS", {"fake": ["bench_fake.py"]})
    results = tmp_path / "RESULTS.md"
    results.write_text(f"before\n{run_all.BEGIN}\nold\n{run_all.END}\nafter\n")
    assert run_all.main(["--json", str(tmp_path / "r.json"), "--results", str(results)]) == status
    assert json.loads((tmp_path / "r.json").read_text()) == {"fake": RATIO}
    text = results.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| fake | 2.00 | 1.00 to 3.50 |" in text and ("misses its bar" in text) == bool(status)
    assert "| fake | 2.00" in capsys.readouterr().out


def test_a_file_without_a_place_for_the_table_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(run_all, "run", lambda *_: pytest.fail("it ran"))
    (tmp_path / "RESULTS.md").write_text("no marks\n")
    with pytest.raises(ValueError, match="has no place for the table"):
        run_all.main(["--results", str(tmp_path / "RESULTS.md")])


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(run_all, "run", lambda *_: pytest.fail("it ran"))
    with pytest.raises(FileNotFoundError):
        run_all.main(["--json", str(tmp_path / "nowhere" / "r.json")])


def test_a_benchmark_that_fails_has_a_row_that_says_so(tmp_path, monkeypatch, capsys):
    (tmp_path / "bench_fake.py").write_text("raise RuntimeError\n")
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(run_all, "BENCHMARKS", {"fake": ["bench_fake.py"]})
    assert run_all.main([]) == 1
    assert "| fake: failed |" in capsys.readouterr().out


def test_every_benchmark_of_the_list_is_there():
    assert all((ROOT / "benchmarks" / command[0]).is_file() for command in run_all.BENCHMARKS.values())
