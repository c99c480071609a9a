"""Connectionist temporal classification: loss, greedy decoding, and the lengths that both rest on.

Axes: B trials, P output frames (patches), C classes, S labels. Class 0 is the blank.
Graves et al., "Connectionist temporal classification", ICML 2006.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

BLANK = 0


def output_lengths(n_time_steps, patch_size: int, patch_stride: int):
    """Number of output frames of a trial: floor((T - patch_size) / patch_stride) + 1, and 0 where T < patch_size.

    Args:
        n_time_steps: time bins, as an int, a numpy array or a tensor of integers.
        patch_size: bins a patch; 0 switches patching off, and every bin is a frame.
        patch_stride: bins between the starts of two patches.
    Returns:
        frames, of the same type as n_time_steps.
    """
    if patch_size == 0:
        return n_time_steps
    patches = (n_time_steps - patch_size) // patch_stride + 1
    if isinstance(patches, torch.Tensor):
        return patches.clamp(min=0)
    return np.maximum(patches, 0) if isinstance(patches, np.ndarray) else max(patches, 0)


def required_frames(labels: Sequence[int]) -> int:
    """Least number of frames that can emit the labels: one each, and a blank between two equal neighbours."""
    return len(labels) + sum(a == b for a, b in itertools.pairwise(labels))


def ctc_loss(
    logits: torch.Tensor, labels: torch.Tensor, logit_lengths: torch.Tensor, label_lengths: torch.Tensor
) -> torch.Tensor:
    """Negative log-likelihood of each trial's labels, not divided by their number.

    Args:
        logits: (B, P, C), of any floating dtype; the loss is computed in float32, or in float64 if they are that.
        labels: (B, S) integers, padded with anything beyond label_lengths.
        logit_lengths: (B,) valid frames; on CUDA best on the host, where torch needs them.
        label_lengths: (B,) valid labels; the same.
    Returns:
        (B,) losses; infinite where the labels do not fit into the frames (see `required_frames`).
    """
    with torch.autocast(device_type=logits.device.type, enabled=False):
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_probs = logits.to(dtype).log_softmax(-1).transpose(0, 1)
        if logits.device.type == "xla":
            import xla_ops  # F.ctc_loss would leave the device, four times a step

            return xla_ops.ctc_loss(log_probs, labels, logit_lengths, label_lengths)
        return F.ctc_loss(log_probs, labels, logit_lengths, label_lengths, blank=BLANK, reduction="none")


def greedy_collapse(frames: Sequence[int] | np.ndarray) -> list[int]:
    """The labels that a path of frame classes stands for: repeats merged first, blanks removed after.

    The order matters: [31, 31, 0, 31, 0, 5] is [31, 31, 5]; removing blanks first would lose the second 31.
    """
    frames = np.asarray(frames)
    if frames.size == 0:
        return []
    changed = np.concatenate([[True], frames[1:] != frames[:-1]])
    return frames[changed & (frames != BLANK)].tolist()


def greedy_decode(logits: torch.Tensor, logit_lengths: torch.Tensor) -> list[list[int]]:
    """Best path of each trial, collapsed. logits (B, P, C), logit_lengths (B,) -> B lists of classes."""
    return collapse_paths(logits.argmax(-1), logit_lengths)


def collapse_paths(paths: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """Each trial's path of classes, collapsed. paths (B, P), lengths (B,) -> B lists of classes."""
    return [greedy_collapse(path[:length]) for path, length in zip(paths.cpu().numpy(), lengths.tolist(), strict=True)]
