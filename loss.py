"""The training loss, as one value a trial, so that batches, ranks and padding cannot bend it.

    loss = clean CTC + ramp * noisy_loss_weight * noisy CTC + noise_l2_weight * mean square of the noise

The single-GRU decoder's is the clean CTC alone. CTC is the whole trial's negative log-likelihood, not divided by the
number of labels: the original decoder's learning rates and gradient clipping rest on that scale.
"""

from typing import Any, NamedTuple

import torch

from ctc import ctc_loss, output_lengths
from data_augmentations import beside


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
        model: the decoder, or its wrapped form.
        config: its `adversarial` section, architecture and patch sizes are read.
        features: (B, T, F), after augmentation and smoothing.
        n_time_steps: (B,) valid bins.
        day_indices: (B,).
        labels: (B, S), padded.
        label_lengths: (B,).
        ramp: from `adversarial_ramp`; a number or a tensor of one element.
    """
    adversarial = config.adversarial
    lengths = output_lengths(n_time_steps, config.model.patch_size, config.model.patch_stride)
    if config.model.architecture == "gru":
        clean = ctc_loss(model(features, day_indices), labels, lengths, label_lengths)
        return TrialLosses(clean, clean, torch.zeros_like(clean), torch.zeros_like(clean))
    if not adversarial.enabled:
        clean_logits, noise_power = model(features, day_indices, mode="train_clean")
        clean = ctc_loss(clean_logits, labels, lengths, label_lengths)
        noisy = torch.zeros_like(clean)
    else:
        clean_logits, noisy_logits, noise_power = model(
            features, day_indices, mode="train", grl_lambda=ramp * adversarial.grl_lambda
        )
        # Both branches in one call: on XLA that is one loop over time in place of two.
        clean, noisy = ctc_loss(
            torch.cat([clean_logits, noisy_logits]), labels.repeat(2, 1), lengths.repeat(2), label_lengths.repeat(2)
        ).chunk(2)
    noise_l2 = mean_over_valid(noise_power, lengths)
    total = clean + ramp * adversarial.noisy_loss_weight * noisy + adversarial.noise_l2_weight * noise_l2
    return TrialLosses(total, clean, noisy, noise_l2)


def mean_over_valid(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Mean of each trial's values over its valid frames. values (B, P), lengths (B,) -> (B,)."""
    lengths = beside(lengths, values)
    valid = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
    return (values * valid).sum(1) / lengths.clamp(min=1)
