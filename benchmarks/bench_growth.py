"""How time and memory of a training step grow with trials, time bins, sessions and processes, on a CPU.

    python benchmarks/bench_growth.py

The quickstart's model (10.8 M parameters with 4 sessions), one thread, each point in a process of its own; the median
of 5 steps after a first one, and the peak of the process's memory above that of the program with the model. A batch has
trials of 4 sessions, however many the model knows. Growth is the exponent between neighbouring points: 1 is linear, 0
is no growth. Bars: at most 1.15 in trials and bins, for time and for memory; 1 ms for a session that is not in the
batch (its rows of the day layers' gradient, which is one tensor, are filled with zeros, counted in the norm and found
to be zero); two processes do 1.6 times the trials a second of one.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("USE_TORCH_XLA", "0")

import paired
import torch

from backend import Backend
from config import load_config
from optimizer import make_optimizer
from rnn_model import build_model
from training_log import progress_bar
from training_step import TrainingStep

N_STEPS, N_DAYS_A_BATCH = 5, 4
AXES = {  # trials, bins, sessions, processes; one of them moves
    "trials": [(n, 600, 4, 1) for n in (8, 16, 32, 64)],
    "bins": [(16, n, 4, 1) for n in (300, 600, 1200, 2400)],
    "sessions": [(16, 600, n, 1) for n in (4, 45, 180)],
    "processes": [(16, 600, 4, n) for n in (1, 2)],
}
MOST_GROWTH, MOST_MS_A_SESSION, LEAST_OF_PROCESSES = 1.15, 1.0, 1.6


def measure(n_trials: int, n_bins: int, n_sessions: int) -> dict[str, float]:
    """In a process of its own: seconds a step, and GB at the most."""
    torch.set_num_threads(1)
    sessions = json.dumps([f"t15.2030.{1 + n // 28:02d}.{1 + n % 28:02d}" for n in range(n_sessions)])
    config = load_config(
        paired.ROOT / "rnn_args_quickstart.yaml",
        [f"dataset.sessions={sessions}", "dataset.dataset_probability_val=null", "log_with=none"],
    )
    backend = Backend("cpu")
    backend.seed(0)
    model = build_model(config)
    step = TrainingStep(model, make_optimizer(model, config, "cpu"), config, backend)
    n_labels, seconds = n_bins // 30, []
    for number in range(N_STEPS + 1):
        days = (torch.arange(n_trials) * N_DAYS_A_BATCH // n_trials + N_DAYS_A_BATCH * number) % n_sessions
        batch = {
            "features": torch.randn(n_trials, n_bins, paired.N_FEATURES),
            "n_time_steps": torch.full((n_trials,), n_bins),
            "day_indices": days,
            "labels": torch.randint(1, 41, (n_trials, n_labels)),
            "label_lengths": torch.full((n_trials,), n_labels),
            "weights": torch.ones(n_trials),
        }
        start = time.perf_counter()
        step([batch], number)
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[1:]), "gigabytes": paired.peak_memory(), "rank": backend.rank}


def in_processes(n_trials: int, n_bins: int, n_sessions: int, n_processes: int) -> dict[str, float]:
    """What the first of so many processes measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_processes}"]
    command = command if n_processes > 1 else [sys.executable]
    point = map(str, (n_trials, n_bins, n_sessions))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, __file__, "--child", *point], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return next(each for each in found if each["rank"] == 0)


def exponents(values: list[float], sizes: list[int]) -> list[float]:
    """Of the growth from each point to the next."""
    return [math.log(values[i + 1] / values[i]) / math.log(sizes[i + 1] / sizes[i]) for i in range(len(values) - 1)]


def main() -> int:
    parser = paired.parser_of(__doc__)
    parser.add_argument("--child", type=int, nargs=3, help=paired.argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child)), flush=True)
        return 0
    figures: dict[str, Any] = {}
    measured: dict[tuple[int, ...], dict[str, float]] = {}
    points = [point for axis in AXES.values() for point in axis]
    with progress_bar(len(points), 0, "point", "growth") as bar:
        for point in points:
            if point not in measured:
                measured[point] = in_processes(*point)
            bar.update()
    bare = in_processes(1, 16, 4, 1)["gigabytes"]  # the program and the model, next to no batch
    for number, (axis, of_axis) in enumerate(AXES.items()):
        sizes = [point[number] for point in of_axis]
        found = [measured[point] for point in of_axis]
        figures[axis] = {
            str(size): {"ms": 1e3 * each["seconds"], "GB": each["gigabytes"] - bare}
            for size, each in zip(sizes, found, strict=True)
        }
        print(axis)
        for size, each in figures[axis].items():
            print(f"  {size:>5}: {each['ms']:7.0f} ms, {each['GB']:.2f} GB")
    ratios, passed = {}, True
    for axis in ("trials", "bins"):
        for what, key in (("time", "ms"), ("memory", "GB")):
            values = exponents([each[key] for each in figures[axis].values()], [int(size) for size in figures[axis]])
            ratios[f"growth with {axis}, {what} (exponent)"] = paired.spread(values)
            passed &= statistics.median(values) <= MOST_GROWTH
    times = [each["ms"] for each in figures["sessions"].values()]
    numbers = [int(number) for number in figures["sessions"]]
    a_session = (times[-1] - times[0]) / (numbers[-1] - numbers[0])
    print(f"a session more: {a_session:.2f} ms")
    ratios["growth with sessions, 180 over 4, time"] = paired.spread([times[-1] / times[0]])
    one, two = (each["ms"] for each in figures["processes"].values())
    ratios["two processes over one, trials a second"] = paired.spread([2 * one / two])
    passed &= a_session <= MOST_MS_A_SESSION and 2 * one / two >= LEAST_OF_PROCESSES
    paired.finish(options.json, ratios, figures)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
