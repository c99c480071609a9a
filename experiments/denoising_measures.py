"""What a NoiseModel does to trials whose parts are known: what it takes for noise, and how much speech that is.

The data are simulated with `--write_parts`, so that each trial holds its true speech and structured noise. All is
measured in the day-transformed space, in which the NoiseModel works: after smoothing, day layer and patches. The day
layer ends in a softsign, so that a part of the features, such as the noise, stands there as what it changes:

    part in that space = transformed(features) - transformed(features - part)

Axes: T bins, F features, P patches, W = patch_size * F, C classes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import h5py
import numpy as np
import torch

from config import Config
from data_augmentations import transform_data
from dataset_index import Trial
from evaluate_model_helpers import PHONEMES
from rnn_model import Decoder, make_patches

PARTS = ("noise", "speech", "private")
RIDGE = 10.0  # added to a bin's squared features in the linear estimate: far less than 10,000 bins of training have
PROBE_EPOCHS, PROBE_BATCH, PROBE_RATE, PROBE_DECAY = 4, 256, 3e-4, 0.1


class DenoisedTrial(NamedTuple):
    """A trial in the day-transformed space.

    bins (T, F) and true_bins, the structured noise in them; signal (P, W), and noise (P, W), its estimate (None of a
    decoder without one); parts: name -> (P, W), for PARTS; classes (P,): the class spoken at each patch's centre.
    """

    day: int
    bins: torch.Tensor
    true_bins: torch.Tensor
    signal: torch.Tensor
    noise: torch.Tensor | None
    parts: dict[str, torch.Tensor]
    classes: torch.Tensor


@torch.no_grad()
def denoised_trials(model: Decoder, trials: Sequence[Trial], config: Config) -> Iterator[DenoisedTrial]:
    """Each trial through the model's first half.

    Args:
        model: on the CPU.
        trials: of files that were written with `--write_parts`.
    """
    model.eval()
    size, stride = config.model.patch_size, config.model.patch_stride
    for trial in trials:
        with h5py.File(trial.path, "r") as file:
            group = file[trial.key]
            features, speech, noise = (
                torch.from_numpy(group[name][:]) for name in ("input_features", "speech", "noise")
            )
            classes = torch.from_numpy(group["frame_classes"][:].astype(np.int64))
        # The trial, and the trial without each of its parts: four rows of a batch.
        rows = torch.stack([features, features - noise, features - speech, speech + noise])
        lengths, days = torch.full((4,), len(features)), torch.full((4,), trial.day)
        rows, _ = transform_data(rows, lengths, config.dataset.data_transforms, training=False)
        bins = model.day_layers(rows, days)
        patches = make_patches(bins, size, stride)
        signal, estimate = model.denoise(rows[:1], days[:1])
        parts = {name: signal[0] - patches[:, row] for row, name in enumerate(PARTS, 1)}
        centres = torch.arange(len(patches)) * stride + size // 2
        estimate = None if estimate is None else estimate[0]
        yield DenoisedTrial(trial.day, bins[0], bins[0] - bins[1], signal[0], estimate, parts, classes[centres])


class Agreement:
    """How an estimate goes with a truth, over many frames; both without their means over a session's frames.

    Means are each feature's own: an offset that never changes is no noise that could be taken for speech.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, torch.Tensor]] = {}

    def add(self, day: int, estimate: torch.Tensor, truth: torch.Tensor) -> None:
        """estimate, truth: (frames, features)."""
        x, y = estimate.double(), truth.double()
        sums = torch.stack([x.sum(0), y.sum(0), (x * x).sum(0), (y * y).sum(0), (x * y).sum(0)])
        n, before = self._sums.get(day, (0, 0.0))
        self._sums[day] = n + len(x), before + sums

    def covariances(self) -> tuple[float, float, float]:
        """Variance of the estimate, of the truth, and their covariance: sums over sessions and features."""
        total = torch.zeros(3, dtype=torch.float64)
        for n, (x, y, xx, yy, xy) in self._sums.values():
            total += torch.stack([(xx - x * x / n).sum(), (yy - y * y / n).sum(), (xy - x * y / n).sum()])
        return tuple(total.tolist())

    @property
    def correlation(self) -> float:
        """Pearson's; 0 where one of the two does not vary."""
        xx, yy, xy = self.covariances()
        return xy / (xx * yy) ** 0.5 if xx > 0 and yy > 0 else 0.0

    @property
    def slope(self) -> float:
        """How much of the truth is in the estimate: 1 for all of it, 0 for none."""
        _, yy, xy = self.covariances()
        return xy / yy if yy > 0 else 0.0


def noise_measures(model: Decoder, train: Sequence[Trial], val: Sequence[Trial], config: Config) -> dict[str, float]:
    """How the noise estimates on val go with the true parts, and what a linear classifier reads from them.

    Args:
        train: trials that the probe and the linear estimate are fitted to.
    Returns:
        probe_signal, probe_noise, probe_denoised: shares of val's patches whose centre's class multinomial logistic
        regression tells right from the patch of the signal, of the estimate, of their difference; probe_silence: the
        share of the commonest class. linear_correlation: of the true noise with a ridge regression of it on single
        bins, which is fitted with the truth at hand. noise_share: mean square of the estimate over that of the signal.
        Of each of PARTS, <part>_correlation with the estimate, and <part>_subtracted: how much of it the estimate takes
        away, 1 for all of it (the slope of the estimate on the part). The entries of the estimate are missing of a
        decoder without one.
    """
    fitted, square, products = _Views(), 0.0, 0.0
    for trial in denoised_trials(model, train, config):
        fitted.add(trial)
        square, products = square + trial.bins.T @ trial.bins, products + trial.bins.T @ trial.true_bins
    weights = torch.linalg.solve(square + RIDGE * torch.eye(len(square)), products)

    tested, linear, power = _Views(), Agreement(), torch.zeros(2, dtype=torch.float64)
    agreements = {name: Agreement() for name in PARTS}
    for trial in denoised_trials(model, val, config):
        tested.add(trial)
        linear.add(trial.day, trial.bins @ weights, trial.true_bins)
        if trial.noise is not None:
            power += torch.stack([x.double().square().sum() for x in (trial.noise, trial.signal)])
            for name, agreement in agreements.items():
                agreement.add(trial.day, trial.noise, trial.parts[name])
    measures = {"linear_correlation": linear.correlation}
    if power[1] > 0:
        measures["noise_share"] = float(power[0] / power[1])
        for name, agreement in agreements.items():
            measures |= {f"{name}_correlation": agreement.correlation, f"{name}_subtracted": agreement.slope}
    return measures | _probe_accuracies(fitted, tested)


class _Views:
    """What a probe is given: signal, noise estimate, denoised signal (patches, W), and the classes (patches,)."""

    def __init__(self) -> None:
        self._parts: dict[str, list[torch.Tensor]] = {}

    def add(self, trial: DenoisedTrial) -> None:
        views = {"signal": trial.signal, "classes": trial.classes}
        if trial.noise is not None:
            views |= {"noise": trial.noise, "denoised": trial.signal - trial.noise}
        for name, view in views.items():
            self._parts.setdefault(name, []).append(view)

    def take(self, name: str) -> torch.Tensor:
        """All of one kind; they are not kept."""
        return torch.cat(self._parts.pop(name))

    @property
    def names(self) -> list[str]:
        return list(self._parts)


def _probe_accuracies(fitted: _Views, tested: _Views) -> dict[str, float]:
    train_classes, val_classes = fitted.take("classes"), tested.take("classes")
    accuracies = {"probe_silence": float((val_classes == train_classes.mode().values).double().mean())}
    for name in fitted.names:
        train, val = fitted.take(name), tested.take(name)
        accuracies[f"probe_{name}"] = probe_accuracy(train, train_classes, val, val_classes)
    return accuracies


def probe_accuracy(
    train: torch.Tensor, train_classes: torch.Tensor, val: torch.Tensor, val_classes: torch.Tensor
) -> float:
    """Share of val (patches, W) told right by logistic regression trained on train, features standardised."""
    mean, scale = train.mean(0), 1 / train.std(0).clamp(min=1e-6)
    train, val = (train - mean).mul_(scale), (val - mean).mul_(scale)
    generator = torch.Generator().manual_seed(0)
    classifier = torch.nn.Linear(train.shape[1], len(PHONEMES))
    torch.nn.init.zeros_(classifier.weight)
    torch.nn.init.zeros_(classifier.bias)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=PROBE_RATE, weight_decay=PROBE_DECAY)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, PROBE_EPOCHS * -(-len(train) // PROBE_BATCH))
    for _ in range(PROBE_EPOCHS):
        for chosen in torch.randperm(len(train), generator=generator).split(PROBE_BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(classifier(train[chosen]), train_classes[chosen]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return float((classifier(val).argmax(-1) == val_classes).double().mean())
