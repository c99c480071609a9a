"""How much of the simulated speech can be read from a single time bin, and how fast the simulator is.

    python benchmarks/bench_simulator.py

Trains multinomial logistic regression on single bins of one session (the easiest case: no drift) to tell the class
spoken in each, and tests it on the session's held-out blocks. A simulator from which that is easy would need no
recurrent network: the bar is under 50% of the bins, in every setting.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from evaluate_model_helpers import PHONEMES, SILENCE
from synthetic_data import make_participant, simulate_session
from synthetic_neural import Settings, sessions_of

SETTINGS = {
    "default": ({}, (4, 14)),
    "quickstart": ({"speaking_rate": 6.0, "speech_variance": 0.1}, (2, 4)),  # as quickstart.sh has it
    "clear": ({"speaking_rate": 6.0, "speech_variance": 0.28}, (2, 4)),
}
BAR = 0.5


def bins_and_classes(blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, F) features and (N,) the class spoken in each bin."""
    features = np.concatenate([block.features for block in blocks])
    classes = [utterance.frame_classes() for block in blocks for utterance in block.utterances]
    return torch.from_numpy(features), torch.from_numpy(np.concatenate(classes))


def logistic_regression(
    x: torch.Tensor, y: torch.Tensor, epochs: int = 12, weight_decay: float = 1e-2
) -> torch.nn.Linear:
    """Multinomial logistic regression by AdamW, its learning rate falling to zero."""
    classifier = torch.nn.Linear(x.shape[1], len(PHONEMES))
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=3e-3, weight_decay=weight_decay)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - epoch / epochs)
        for index in torch.randperm(len(x)).split(512):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(classifier(x[index]), y[index]).backward()
            optimizer.step()
    return classifier


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", type=int, default=300, help="training trials (300)")
    parser.add_argument("--seed", type=int, default=0, help="of the simulation (0)")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    passed = True
    for name, (changes, words) in SETTINGS.items():
        session = next(sessions_of(make_participant(Settings(seed=options.seed, **changes), words)))
        start = time.perf_counter()
        blocks = list(simulate_session(session, 0, (options.train, 60, 0), words))
        seconds = time.perf_counter() - start
        held_out = [block for block in blocks if "val" in block.block.splits]
        x, y = bins_and_classes([block for block in blocks if "train" in block.block.splits])
        x_val, y_val = bins_and_classes(held_out)
        classifier = logistic_regression(x, y)
        with torch.no_grad():
            correct = (classifier(x_val).argmax(1) == y_val).float()
        silence = y_val == SILENCE
        accuracy = correct.mean().item()
        passed &= accuracy < BAR
        n_bins = len(y) + len(y_val)
        print(
            f"{name}: single bins {accuracy:.1%} right (bar: under {BAR:.0%}); phonemes' bins "
            f"{correct[~silence].mean():.1%}, silence's {correct[silence].mean():.1%}; always silence would be "
            f"{silence.float().mean():.1%} right. {len(y)} training bins, {len(y_val)} held-out bins.\n"
            f"    simulated {n_bins} bins of {x.shape[1]} features in {seconds:.1f} s: {n_bins / seconds:.0f} bins/s"
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
