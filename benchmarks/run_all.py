"""Every benchmark that has a reference, one after the other: the table of ratios in RESULTS.md.

    python benchmarks/run_all.py                        # about half an hour on two cores, 4 GB of temporary files
    python benchmarks/run_all.py --only loading --json ratios.json

The table is printed; --json writes name -> {min, median, max}. With --results FILE the table replaces the one between
the two marks in that file. A benchmark that misses its bar is marked, and then the exit status is 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BENCHMARKS = {  # what --only takes; the first line of a script says what it measures
    "loading": ["bench_loading.py"],
    "batches": ["bench_batches.py"],
    "step": ["bench_step.py"],
    "evaluation": ["bench_evaluation.py"],
    "growth": ["bench_growth.py"],
    "decode": ["bench_decode.py", "--sentences", "150"],
    "streaming": ["bench_streaming.py"],
    "xla": ["bench_xla_step.py"],
}
ON_ONE_CORE = ("bench_decode.py", "bench_streaming.py")
BEGIN, END = "<!-- ratios: begin -->", "<!-- ratios: end -->"


def run(script: str, options: list[str], folder: Path) -> tuple[dict[str, dict[str, float]], int]:
    """The ratios of a benchmark, and its exit status; what it prints goes to the terminal."""
    file = folder / f"{script}.json"
    command = [sys.executable, str(HERE / script), *options, "--json", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if script in ON_ONE_CORE else None
    status = subprocess.run(command, env=environment).returncode
    return (json.loads(file.read_text())["ratios"] if file.exists() else {}), status


def table(found: dict[str, dict[str, dict[str, float]]], missed: list[str]) -> str:
    """Markdown."""
    lines = ["| ratio | median | min to max | command |", "|---|---|---|---|"]
    for name, ratios in found.items():
        mark = " (misses its bar)" if name in missed else ""
        if not ratios:
            lines.append(f"| {name}: failed | | | `python benchmarks/{BENCHMARKS[name][0]}` |")
        command = f"`python benchmarks/{BENCHMARKS[name][0]}`{mark}"
        lines += [
            f"| {what} | {ratio['median']:.2f} | {ratio['min']:.2f} to {ratio['max']:.2f} | {command} |"
            for what, ratio in ratios.items()
        ]
    return "\n".join(lines) + "\n"


def replace_table(file: Path, text: str) -> None:
    """Put the table between the marks.

    Raises:
        ValueError: the marks are not there.
    """
    before, begin, rest = file.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file} has no place for the table: the lines {BEGIN} and {END}")
    file.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--json", metavar="FILE", type=Path, help="write name -> {min, median, max} there")
    parser.add_argument("--results", metavar="FILE", type=Path, help="put the table there, between its marks")
    options = parser.parse_args(arguments)
    if options.json:
        options.json.touch()
    if options.results:  # before half an hour's work
        replace_table(options.results, options.results.read_text().partition(BEGIN)[2].partition(END)[0].lstrip("\n"))
    found, missed = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only or BENCHMARKS:
            script, *more = BENCHMARKS[name]
            print(f"== {name} ({script})", flush=True)
            start = time.perf_counter()
            found[name], status = run(script, more, Path(folder))
            outcome = "done" if not status else "bar missed" if found[name] else "failed"
            print(f"== {name}: {outcome}, {time.perf_counter() - start:.0f} s", flush=True)
            if status or not found[name]:
                missed.append(name)
    text = table(found, missed)
    print(text)
    if options.json:
        ratios = {what: ratio for of_one in found.values() for what, ratio in of_one.items()}
        options.json.write_text(json.dumps(ratios, indent=2) + "\n")
    if options.results:
        replace_table(options.results, text)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
