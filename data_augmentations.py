"""What is random in training, and the smoothing that training and evaluation share.

Pure functions on features (B, T, F), on their device, of any floating dtype, which they keep: B trials, T
time bins of 20 ms, F features, z-scored, so that every standard deviation here is in units of a feature's
own. `n_time_steps` (B,) counts the valid bins of a trial; those at or beyond it are padding and exactly zero
before and after `transform_data`. Shapes depend on no value, and nothing waits for the device.

`generator` is a torch.Generator of the features' device, or None for the device's own random state: on XLA
always None, since a generator there would draw on the host.
"""

import functools
import math

import torch
import torch.nn.functional as F


def beside(values: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """A few numbers on the device of features, without waiting for what that is still doing."""
    if features.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    return values.to(features.device, non_blocking=True)


def valid_bins(features: torch.Tensor, n_time_steps: torch.Tensor) -> torch.Tensor:
    """(B, T, 1) mask, True where a bin is not padding."""
    return (
        torch.arange(features.shape[1], device=features.device) < beside(n_time_steps, features)[:, None]
    ).unsqueeze(-1)


def zero_padding(features: torch.Tensor, n_time_steps: torch.Tensor) -> torch.Tensor:
    """features (B, T, F) with exact zeros at and beyond n_time_steps (B,)."""
    return torch.where(valid_bins(features, n_time_steps), features, 0.0)


def _normal(shape: tuple, features: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Standard normal numbers of the given shape, in the dtype and on the device of features."""
    return torch.randn(shape, dtype=features.dtype, device=features.device, generator=generator)


def _uniform_integers(highest: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Integers drawn evenly from 0..highest, both ends included; highest (B, N) or so, int64."""
    draws = torch.rand(highest.shape, device=highest.device, generator=generator)
    return torch.minimum((draws * (highest + 1)).long(), highest)  # a product may round up to highest + 1


def static_gain(features: torch.Tensor, std: float, generator: torch.Generator | None) -> torch.Tensor:
    """Multiplies each channel of each trial by 1 + N(0, std), constant over its bins; padding stays zero.

    The original multiplied by an F x F matrix a trial; the diagonal is what a drifting gain means.
    """
    batch, _, channels = features.shape
    return features * (1 + std * _normal((batch, 1, channels), features, generator))


def white_noise(features: torch.Tensor, std: float, generator: torch.Generator | None) -> torch.Tensor:
    """Adds N(0, std) to each bin of each channel, in padding too (`transform_data` clears it)."""
    return torch.add(features, _normal(features.shape, features, generator), alpha=std)


def constant_offset(features: torch.Tensor, std: float, generator: torch.Generator | None) -> torch.Tensor:
    """Adds N(0, std) to each channel of each trial, constant over its bins, in padding too."""
    batch, _, channels = features.shape
    return torch.add(features, _normal((batch, 1, channels), features, generator), alpha=std)


def random_walk(features: torch.Tensor, std: float, axis: int, generator: torch.Generator | None) -> torch.Tensor:
    """Adds the running sum of steps N(0, std) along axis: 1 over time in each channel, -1 over channels in
    each bin.

    Padding gets it too. A bin's value depends on no bin behind it, so none depends on padding.
    """
    wide = torch.promote_types(features.dtype, torch.float32)  # a long sum in bf16 stops growing (on XLA)
    steps = torch.randn(features.shape, dtype=wide, device=features.device, generator=generator)
    return features + (steps.cumsum(axis) * std).to(features.dtype)


def random_cut(
    features: torch.Tensor, n_time_steps: torch.Tensor, cut: int, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes the first 0..cut-1 bins from each trial, drawn evenly and for each trial apart.

    The trial moves to the front and the shape stays: the freed bins at the end are zeros, n_time_steps is
    less by as many. One bin at least remains of a trial that has any. Cuts are drawn where n_time_steps is;
    a generator of another device stands for its seed there, whatever it has drawn.
    """
    batch, bins, channels = features.shape
    if generator is not None and generator.device.type != n_time_steps.device.type:
        generator = torch.Generator(n_time_steps.device).manual_seed(generator.initial_seed())
    cuts = torch.randint(0, cut, (batch,), device=n_time_steps.device, generator=generator)
    cuts = torch.minimum(cuts, (n_time_steps - 1).clamp(min=0))
    n_time_steps = n_time_steps - cuts
    cuts = beside(cuts, features)
    # Whole rows of a (B * T, F) table: cheaper than a gather, which needs an index for every element.
    time = torch.arange(bins, device=features.device) + cuts[:, None]  # (B, T)
    rows = torch.arange(batch, device=features.device)[:, None] * bins + time.clamp(max=bins - 1)
    shifted = features.reshape(batch * bins, channels).index_select(0, rows.flatten()).view_as(features)
    return zero_padding(shifted, n_time_steps), n_time_steps


def _spans(limits: torch.Tensor, width: int, n_masks: int, longest: int, generator) -> torch.Tensor:
    """(B, width) mask of n_masks spans, each 0..longest long, within the first limits (B,) positions."""
    limits = limits[:, None].expand(-1, n_masks)
    lengths = torch.minimum(_uniform_integers(torch.full_like(limits, longest), generator), limits)
    starts = _uniform_integers(limits - lengths, generator)
    position = torch.arange(width, device=limits.device)
    inside = (position >= starts[..., None]) & (position < (starts + lengths)[..., None])  # (B, N, width)
    return inside.any(1)


def time_masks(
    features: torch.Tensor,
    n_time_steps: torch.Tensor,
    n_masks: int,
    mask_bins: int,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Zeroes n_masks spans of bins a trial, in all channels.

    A span's length is even in 0..mask_bins, its start even over where it fits into the valid bins, so that
    padding dilutes nothing. Spans may overlap. 0 is a z-scored feature's mean.
    """
    spans = _spans(beside(n_time_steps, features), features.shape[1], n_masks, mask_bins, generator)
    return torch.where(spans[:, :, None], 0.0, features)


def channel_masks(
    features: torch.Tensor, n_masks: int, mask_size: int, generator: torch.Generator | None
) -> torch.Tensor:
    """Zeroes n_masks spans of neighbouring channels a trial, in all bins.

    A span's length is even in 0..mask_size, its start even over where it fits. Spans may overlap.
    """
    batch, _, channels = features.shape
    limits = torch.full((batch,), channels, dtype=torch.int64, device=features.device)
    spans = _spans(limits, channels, n_masks, mask_size, generator)
    return torch.where(spans[:, None, :], 0.0, features)


@functools.lru_cache(maxsize=16)
def gaussian_kernel(std: float, size: int) -> tuple[float, ...]:
    """Taps of the smoothing kernel, an odd number, symmetric, summing to 1 (std 2, size 100: 9 taps).

    A Gaussian normalised over +-4 std (as scipy.ndimage.gaussian_filter1d has it), over a window of `size`
    bins at most; entries of 0.01 or less are dropped and the rest is normalised again.

    Raises:
        ValueError: std is not positive, size is below 1, or no entry is above 0.01 (std above about 39).
    """
    if std <= 0 or size < 1:
        raise ValueError(f"smoothing needs smooth_kernel_std > 0 and smooth_kernel_size >= 1, got {std} and {size}")
    radius = int(4 * std + 0.5)
    density = [math.exp(-0.5 * (offset / std) ** 2) for offset in range(-radius, radius + 1)]
    total = math.fsum(density)
    half = (size - 1) // 2
    taps = [
        value / total
        for offset, value in zip(range(-radius, radius + 1), density, strict=True)
        if abs(offset) <= half and value / total > 0.01
    ]
    if not taps:
        raise ValueError(f"smooth_kernel_std {std}: no entry of the kernel is above 0.01; use 39 or less")
    return tuple(tap / math.fsum(taps) for tap in taps)


def smoothing_taps(std: float, size: int, causal: bool) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What a bin and those before it weigh, nearest first, and what those after it weigh; summing to 1 together.

    They are those of `gaussian_kernel`. Causal: its half up to the bin, normalised again, and none after it.
    """
    taps = gaussian_kernel(float(std), int(size))
    half = len(taps) // 2
    past, future = taps[half:], taps[half + 1 :]  # the kernel is symmetric
    if causal:
        past, future = tuple(tap / math.fsum(past) for tap in past), ()
    return past, future


def gaussian_smooth(features: torch.Tensor, kernel_std: float, kernel_size: int, causal: bool = False) -> torch.Tensor:
    """Smooths features (B, T, F) over time by `smoothing_taps`; T stays, bins beyond either end count as
    zero.

    A sum of shifted slices, and no convolution: it is exact in every dtype (a convolution multiplies in TF32
    on CUDA, in bf16 on TPU, and lacks bf16 on some CPUs), and a bin's sum does not depend on T. bf16 is
    summed in float32. Padding next to a trial's end gets its tail: `transform_data` clears it.
    """
    past, future = smoothing_taps(kernel_std, kernel_size, causal)
    before, bins = len(past) - 1, features.shape[1]
    wide = torch.promote_types(features.dtype, torch.float32)
    padded = F.pad(features.to(wide), (0, 0, before, len(future)))
    smoothed = padded[:, before : before + bins] * past[0]
    for k in range(1, before + 1):
        smoothed = smoothed.add_(padded[:, before - k : before - k + bins], alpha=past[k])
        if future:
            smoothed = smoothed.add_(padded[:, before + k : before + k + bins], alpha=future[k - 1])
    return smoothed.to(features.dtype)


def transform_data(
    features: torch.Tensor,
    n_time_steps: torch.Tensor,
    transforms,
    training: bool,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Augments (in training) and smooths a batch; the one entry of training, validation and evaluation.

    Args:
        features: (B, T, F), zero at and beyond n_time_steps.
        n_time_steps: (B,) valid bins, int64, on the features' device or on the host.
        transforms: the configuration's dataset.data_transforms.
        training: False leaves everything random out.
        generator: of the features' device, or None.
    Returns:
        features (B, T, F), zero at and beyond the n_time_steps (B,) returned, which are fewer after a random
        cut.
    """
    t = transforms
    if training:
        if t.static_gain_std > 0:
            features = static_gain(features, t.static_gain_std, generator)
        if t.white_noise_std > 0:
            features = white_noise(features, t.white_noise_std, generator)
        if t.constant_offset_std > 0:
            features = constant_offset(features, t.constant_offset_std, generator)
        if t.random_walk_std > 0:
            features = random_walk(features, t.random_walk_std, t.random_walk_axis, generator)
        if t.random_cut > 1:
            features, n_time_steps = random_cut(features, n_time_steps, t.random_cut, generator)
        else:
            features = zero_padding(features, n_time_steps)
        if t.n_time_masks > 0 and t.time_mask_bins > 0:
            features = time_masks(features, n_time_steps, t.n_time_masks, t.time_mask_bins, generator)
        if t.n_channel_masks > 0 and t.channel_mask_size > 0:
            features = channel_masks(features, t.n_channel_masks, t.channel_mask_size, generator)
    if t.smooth_data:
        features = gaussian_smooth(features, t.smooth_kernel_std, t.smooth_kernel_size, t.smooth_causal)
        features = features.masked_fill_(~valid_bins(features, n_time_steps), 0.0)
    return features, n_time_steps
