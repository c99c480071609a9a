"""Logits of whole batches: the one path from features to emissions, for validation, evaluation and inference."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from backend import Backend
from config import n_features
from ctc import output_lengths
from data_augmentations import transform_data


class DecodedBatch(NamedTuple):
    """A batch on the device, its preprocessed features (B, T, F), logits (B, P, C) and valid frames (B,)."""

    batch: dict[str, torch.Tensor]
    features: torch.Tensor
    logits: torch.Tensor
    lengths: torch.Tensor


def batch_logits(
    model: torch.nn.Module, batches: Iterable[dict[str, torch.Tensor]], config: Any, backend: Backend
) -> Iterator[DecodedBatch]:
    """Smooth each batch as in training, without augmentation, and run the decoder on it.

    Args:
        model: on the backend's device; put into evaluation mode.
        batches: from a loader of EvalBatches, or dicts of the same tensors.
        config: preprocessing and patches.
        backend: device and precision.
    Yields:
        one DecodedBatch a batch; the logits are float32, or float64 of a float64 model.
    """
    model.eval()
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    for batch in map(backend.to_device, batches):
        with torch.no_grad(), backend.autocast():
            features, n_time_steps = transform_data(
                batch["features"].to(dtype), batch["n_time_steps"], config.dataset.data_transforms, training=False
            )
            logits = model(features, batch["day_indices"]).to(dtype)
        lengths = output_lengths(n_time_steps, config.model.patch_size, config.model.patch_stride)
        yield DecodedBatch(batch, features, logits, lengths)


def inference_batch(features: Any, day_indices: Any, n_time_steps: Any, config: Any) -> dict[str, torch.Tensor]:
    """The batch that `batch_logits` takes, from a user's raw trials.

    Args:
        features: (B, T, F), day_indices: (B,), n_time_steps: (B,), as tensors, arrays or lists.
        config: sessions, features and patches.
    Raises:
        ValueError: naming everything that does not fit, by trial, and what is possible.
    """
    batch = {
        "features": torch.as_tensor(features, dtype=torch.float32),
        "n_time_steps": torch.as_tensor(n_time_steps, dtype=torch.int64),
        "day_indices": torch.as_tensor(day_indices, dtype=torch.int64),
    }
    problems = _batch_problems(batch, config)
    if problems:
        raise ValueError("\n  - ".join(["inference is not possible with this:", *problems]))
    return batch


def _batch_problems(batch: dict[str, torch.Tensor], config: Any) -> list[str]:
    features, width = batch["features"], n_features(config)
    if features.ndim != 3:
        return [f"features is {tuple(features.shape)}; it must be (trials, time bins, {width} features)"]
    n_trials, n_bins, n_found = features.shape
    problems = []
    if n_trials == 0:
        problems.append("features holds no trial")
    if n_found != width:
        subset = " (those of dataset.feature_subset)" if config.dataset.feature_subset else ""
        problems.append(f"features has {n_found} features a time bin; the model takes {width}{subset}")
    if n_bins < max(config.model.patch_size, 1):
        problems.append(f"features has {n_bins} time bins; one patch takes {max(config.model.patch_size, 1)}")
    sessions = config.dataset.sessions
    bounds = {
        "n_time_steps": (1, n_bins, "the time bins of features"),
        "day_indices": (0, len(sessions) - 1, f"{sessions[0]} to {sessions[-1]}"),
    }
    for name, (least, most, meaning) in bounds.items():
        values = batch[name]
        if values.shape != (n_trials,):
            problems.append(f"{name} is {tuple(values.shape)}; it must be ({n_trials},), one number a trial")
            continue
        for trial, value in enumerate(values.tolist()):
            if not least <= value <= most:
                problems.append(f"{name} of trial {trial} is {value}; possible are {least} to {most} ({meaning})")
    return problems
