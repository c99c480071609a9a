"""What adapting to a new session buys, on simulated drift.

    python benchmarks/bench_finetune.py                                          # simulates and trains one first
    python benchmarks/bench_finetune.py --model_path trained_models/quickstart   # a quickstart's model, on its sessions

Four sessions are known, as in quickstart.sh. Three later ones, 6, 12 and 17 sessions after the last, are decoded with
its day layer, and again after finetune_session.py had 20 of their trials. Bar: the excess over the known sessions' PER
is halved at least, taken over the three sessions.
"""

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from config import load_config
from evaluate_model import evaluation
from finetune_session import PARTS, finetune
from rnn_trainer import BrainToTextDecoder_Trainer
from synthetic_data import simulate
from word_evaluation import WordOptions

ROOT = Path(__file__).resolve().parent.parent
N_KNOWN, DISTANCES, N_TRIALS = 4, (6, 12, 17), 20
SIMULATION = {"speaking_rate": 6.0, "speech_variance": 0.1, "words_per_sentence": (2, 4)}  # as in quickstart.sh
MOST_EXCESS_LEFT = 0.5


def known_model(folder: Path) -> Path:
    """The quickstart's model, trained in `folder`."""
    simulate(folder / "known", sessions=N_KNOWN, trials=(200, 30, 1), **SIMULATION)
    config = load_config(ROOT / "rnn_args_quickstart.yaml")
    config.dataset.dataset_dir, config.output_dir = str(folder / "known"), str(folder / "model")
    BrainToTextDecoder_Trainer(config).train()
    return folder / "model"


def new_sessions(folder: Path) -> list[str]:
    """Names of the later sessions, simulated in folder/new; a session is the same whatever comes before and after."""
    simulate(folder / "new", sessions=N_KNOWN + max(DISTANCES), trials=(N_TRIALS, 60, 1), **SIMULATION)
    names = sorted(path.name for path in (folder / "new").iterdir() if path.is_dir())
    return [names[N_KNOWN - 1 + distance] for distance in DISTANCES]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model_path", help="a quickstart's run directory, in place of training one")
    parser.add_argument("--json", help="write the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.model_path)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if all(figures["excess_left"][part] <= MOST_EXCESS_LEFT for part in PARTS) else 1


def measure(folder: Path, model_path: str | None) -> dict:
    model = Path(model_path) if model_path else known_model(folder)
    logging.getLogger("b2txt").setLevel(logging.WARNING)
    known = evaluation(model, output_dir=folder / "evaluated", word_options=WordOptions(lm="none"))["per"]
    print(f"known sessions: PER {known:.1%}")
    figures = {"known": known, "sessions": {}, "excess_left": {}}
    for session in new_sessions(folder):
        figures["sessions"][session] = {}
        for part in PARTS:
            found = finetune(model, session, folder / f"{session} {part}", folder / "new", part, N_TRIALS)
            figures["sessions"][session] |= {"before": found["per_before"], part: found["per_after"]}
            print(f"{session}: PER {found['per_before']:.1%}, {part} trained {found['per_after']:.1%}", flush=True)
    sessions = figures["sessions"].values()
    for part in PARTS:
        left = sum(pers[part] - known for pers in sessions) / sum(pers["before"] - known for pers in sessions)
        figures["excess_left"][part] = left
        print(f"{part}: {left:.0%} of the excess is left")
    return figures


if __name__ == "__main__":
    sys.exit(main())
