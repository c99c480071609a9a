"""Show the results of a quickstart: validation errors, the commonest confusions, where everything lies.

python quickstart_report.py trained_models/quickstart data/quickstart
"""

import json
import shlex
import sys
from pathlib import Path

from evaluation_report import word_table

FILES = (
    ("checkpoint", "checkpoint/best_checkpoint"),
    ("log", "training_log"),
    ("TensorBoard files", "tensorboard"),
    ("val report", "report_val.html"),
    ("val predictions", "predictions_val.csv"),
    ("test predictions", "predictions_test.csv"),
    ("submission", "submission_test.csv"),
)


def report(run: Path, data: Path) -> str:
    """The table, from the evaluation that stands in the run's directory and the record of the simulation.

    Args:
        run: directory of a run that was evaluated on val.
        data: its data set; where that was not simulated, nothing is said about it.
    """
    results = json.loads((run / "evaluation_val.json").read_text())
    per = "not known" if results["per"] is None else f"{100 * results['per']:.1f}%"
    lines = [f"val PER {per}: {results['edits']} edits in {results['phonemes']} phonemes, {results['n_trials']} trials"]
    simulation = data / "simulation.json"
    if simulation.is_file():
        share = json.loads(simulation.read_text())["speech_variance"]
        lines.append(
            f"(simulated data in which speech explains {share:.0%} of a feature's variance; real: at most 10%)"
        )
    lines += ["", *word_table(results), "", "most confused phonemes   true -> decoded   times"]
    for entry in results["confusions"][:10]:
        true, decoded = (entry[side] or "(nothing)" for side in ("true", "decoded"))
        lines.append(f"{true:>29} -> {decoded:<9}{entry['count']:>6}")
    lines.append("")
    lines += [f"{name:<18} {run / place}" for name, place in FILES if (run / place).exists()]
    lines.append(f"to look at it:     tensorboard --logdir {shlex.quote(str(run / 'tensorboard'))}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(Path(sys.argv[1]), Path(sys.argv[2])))
