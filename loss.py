"""The training loss of the triple decoder, as one value a trial, so that batches, ranks and padding cannot bend it.

    loss = clean CTC + ramp * noisy_loss_weight * noisy CTC + noise_l2_weight * mean square of the noise

CTC is the whole trial's negative log-likelihood, not divided by the number of labels: the original decoder's
learning rates and gradient clipping rest on that scale.
"""

from typing import Any, NamedTuple

import torch

from ctc import ctc_loss, output_lengths


class TrialLosses(NamedTuple):
    """Each (B,): the three parts, and their weighted sum. The last two parts are zero where they were not asked for."""

    total: torch.Tensor
    clean: torch.Tensor
    noisy: torch.Tensor
    noise_l2: torch.Tensor


def adversarial_ramp(step: int, warmup_steps: int) -> float:
    """Share of the adversarial weight and of grl_lambda in force at optimiser step `step`: from above 0 up to 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0


def trial_losses(
    model: torch.nn.Module,
    config: Any,
    features: torch.Tensor,
    n_time_steps: torch.Tensor,
    day_indices: torch.Tensor,
    labels: torch.Tensor,
    label_lengths: torch.Tensor,
    ramp: torch.Tensor | float = 1.0,
) -> TrialLosses:
    """Forward pass and losses of one batch.

    Args:
        model: TripleGRUDecoder, or its wrapped form.
        config: its `adversarial` section and patch sizes are read.
        features: (B, T, F), after augmentation and smoothing.
        n_time_steps: (B,) valid bins.
        day_indices: (B,).
        labels: (B, S), padded.
        label_lengths: (B,).
        ramp: from `adversarial_ramp`; a number or a tensor of one element.
    """
    adversarial = config.adversarial
    lengths = output_lengths(n_time_steps, config.model.patch_size, config.model.patch_stride)
    if not adversarial.enabled:
        clean_logits, noise = model(features, day_indices, mode="denoise")
        clean = ctc_loss(clean_logits, labels, lengths, label_lengths)
        noise_l2 = mean_square(noise, lengths)
        noisy = torch.zeros_like(clean)
    else:
        clean_logits, noisy_logits, noise = model(
            features, day_indices, mode="full", grl_lambda=ramp * adversarial.grl_lambda
        )
        clean = ctc_loss(clean_logits, labels, lengths, label_lengths)
        noisy = ctc_loss(noisy_logits, labels, lengths, label_lengths)
        noise_l2 = mean_square(noise, lengths)
    total = clean + ramp * adversarial.noisy_loss_weight * noisy + adversarial.noise_l2_weight * noise_l2
    return TrialLosses(total, clean, noisy, noise_l2)


def mean_square(noise: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mean square of each trial's noise over its valid patches. noise (B, P, W), lengths (B,) -> (B,)."""
    dtype = torch.float64 if noise.dtype == torch.float64 else torch.float32
    valid = torch.arange(noise.shape[1], device=noise.device) < lengths[:, None]
    per_patch = noise.to(dtype).square().mean(-1)
    return (per_patch * valid).sum(1) / lengths.clamp(min=1)
