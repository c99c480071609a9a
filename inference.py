"""Logits of whole batches: the one path from features to emissions, for validation, evaluation and inference."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from backend import Backend
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
    for batch in backend.to_device(batches):
        with torch.no_grad(), backend.autocast():
            features, n_time_steps = transform_data(
                batch["features"].to(dtype), batch["n_time_steps"], config.dataset.data_transforms, training=False
            )
            logits = model(features, batch["day_indices"], mode="inference").to(dtype)
        lengths = output_lengths(n_time_steps, config.model.patch_size, config.model.patch_stride)
        yield DecodedBatch(batch, features, logits, lengths)
