"""Batches of 64 trials ready on the host, in trials a second, against opening a file for every trial.

    python benchmarks/bench_loading.py        # writes 3.6 GB of noise first, to a temporary folder (--folder: there)

45 sessions, 2,070 trials of 300 to 1,500 bins, 512 features; one process each, in turn. Warm: the files are in the
system's memory. Cold: they were dropped from it. Beside them: the start on 10,948 trials (of 80 bins, so that the
index is what counts) with an index that is kept and without, and the memory of a process that loads 40 batches.
Bars: 5 times the reference's rate warm, 2 times cold (or the disk's own rate), 5 s for a start with a kept index,
1.5 GB of memory.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paired
import reference
from paired import in_turn, in_words, seconds, spread

from config import Config
from dataset import TrainBatches, batch_shapes, make_loader
from dataset_index import index_splits

BATCH_SIZE, ROUNDS, BATCHES_A_ROUND, BATCHES_COLD = 64, 7, 8, 4
REAL_SIZE = {"train": 8_072, "val": 1_426, "test": 1_450}
LEAST_WARM, LEAST_COLD, MOST_START, MOST_MEMORY = 5.0, 2.0, 5.0, 1.5


def our_batches(config: Config, start: int = 0) -> Iterator[dict[str, Any]]:
    """What the trainer takes its batches from."""
    trials = index_splits(config, ("train", "val"))
    shapes = batch_shapes(trials["train"] + trials["val"], config)
    return iter(make_loader(TrainBatches(trials["train"], config, shapes=shapes), config, start=start, num_workers=0))


def rate_of(batches: Iterator[dict[str, Any]], n_batches: int) -> Callable[[], float]:
    """A function that draws so many batches and returns trials a second."""

    def draw() -> None:
        for _ in itertools.islice(batches, n_batches):
            pass

    return lambda: BATCH_SIZE * n_batches / seconds(draw)


def drop_from_memory(root: Path) -> None:
    """Take the files out of the system's page cache; needs no rights."""
    for path in root.rglob("*.hdf5"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_rate(root: Path) -> float:
    """Bytes a second of one train file after the other, read cold in pieces of 8 MiB."""
    drop_from_memory(root)
    paths, piece, total = sorted(root.rglob("data_train.hdf5"))[:12], bytearray(1 << 23), 0

    def read() -> None:
        nonlocal total
        for path in paths:
            with open(path, "rb", buffering=0) as file:
                while n_read := file.readinto(piece):
                    total += n_read

    taken = seconds(read)
    return total / taken


def memory_of_a_loader(folder: Path, n_sessions: int) -> float:
    """GB of a process that loads 40 batches of the first n_sessions."""
    command = [sys.executable, __file__, "--folder", str(folder), "--child", str(n_sessions)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def load_in_child(folder: Path, n_sessions: int) -> None:
    config = paired.config_for("rnn_args_original.yaml", folder / "noise", [f"dataset.batch_size={BATCH_SIZE}"])
    config.dataset.sessions = config.dataset.sessions[:n_sessions]
    for _ in itertools.islice(our_batches(config), 40):
        pass
    print(paired.peak_memory())


def starts(folder: Path) -> dict[str, float]:
    """Seconds of the index of as many trials as the real set has: the first time, and with the index kept."""
    root = folder / "short"
    if not root.exists():
        n_each = {split: n // 45 + 1 for split, n in REAL_SIZE.items()}
        paired.write_noise(root, 45, n_each, lengths=(80, 80, 80), bins_a_label=3)
    config = paired.config_for("rnn_args_original.yaml", root, ["model.patch_size=0", "model.patch_stride=0"])

    def start() -> None:
        found = index_splits(config, ("train", "val"))
        found |= index_splits(config, ("test",), labelled=False)
        assert sum(map(len, found.values())) >= sum(REAL_SIZE.values())

    return {"first": seconds(start), "kept": seconds(start)}


def measure(folder: Path, options: Any) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    root = folder / "noise"
    if not root.exists():
        paired.write_noise(root, 45, {"train": 36, "val": 10})
    os.environ["B2TXT_CACHE_DIR"] = str(folder / "index")
    figures: dict[str, Any] = {"start_seconds": starts(folder)}
    config = paired.config_for("rnn_args_original.yaml", root, [f"dataset.batch_size={BATCH_SIZE}"])
    ours, trials = our_batches(config), index_splits(config, ("train",))["train"]
    theirs = reference.train_batches(trials, config, seed=0)
    for path in root.rglob("*.hdf5"):  # now they are in memory
        path.read_bytes()
    next(ours), next(theirs)
    warm = in_turn([rate_of(theirs, BATCHES_A_ROUND), rate_of(ours, BATCHES_A_ROUND)], ROUNDS, "warm")

    def cold(batches: Iterator[dict[str, Any]]) -> float:
        drop_from_memory(root)
        return rate_of(batches, BATCHES_COLD)()

    bytes_a_trial = sum(path.stat().st_size for path in root.rglob("data_train.hdf5")) / len(trials)
    cold_rates = in_turn(
        [lambda: cold(theirs), lambda: cold(ours), lambda: disk_rate(root) / bytes_a_trial], options.rounds, "cold"
    )
    ratios = {
        "loading, warm": spread(ours / theirs for theirs, ours in warm),
        "loading, cold": spread(ours / theirs for theirs, ours, _ in cold_rates),
        "loading, cold, over the disk's own rate": spread(ours / disk for _, ours, disk in cold_rates),
    }
    for name, rates in (("warm", warm), ("cold", cold_rates)):
        for number, who in enumerate(("reference", "ours", "disk"[: 4 * (name == "cold")])):
            if who:
                figures[f"trials_a_second_{name}_{who}"] = spread(rate[number] for rate in rates)
    figures["gigabytes"] = {f"{n} sessions": memory_of_a_loader(folder, n) for n in (11, 45)}
    return ratios, figures


def main() -> int:
    parser = paired.parser_of(__doc__)
    parser.add_argument("--folder", type=Path, help="write the noise there and keep it, or use what is there")
    parser.add_argument("--rounds", type=int, default=5, help="of the cold comparison (5)")
    parser.add_argument("--child", type=int, help=paired.argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        load_in_child(options.folder, options.child)
        return 0
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ratios, figures = measure(folder, options)
    for name, values in figures.items():
        if name.startswith("trials"):
            print(f"{name.replace('_', ' ')}: {in_words(values, 0)}")
    print("start on 10,948 trials: {first:.1f} s, with the index kept {kept:.2f} s".format(**figures["start_seconds"]))
    print("memory: " + ", ".join(f"{name} {value:.2f} GB" for name, value in figures["gigabytes"].items()))
    paired.finish(options.json, ratios, figures)
    passed = (
        ratios["loading, warm"]["median"] >= LEAST_WARM
        and (
            ratios["loading, cold"]["median"] >= LEAST_COLD
            or ratios["loading, cold, over the disk's own rate"]["median"] >= 1
        )
        and figures["start_seconds"]["kept"] <= MOST_START
        and max(figures["gigabytes"].values()) <= MOST_MEMORY
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
