"""The smoothing of training and evaluation against scipy and a plain convolution."""

import math

import numpy as np
import pytest
import scipy.ndimage
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_augmentations import gaussian_kernel, gaussian_smooth, smoothing_taps


def normal(trials, bins, channels, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(trials, bins, channels, generator=generator, dtype=dtype)


def reference_kernel(std, size):
    impulse = np.zeros(size)
    impulse[size // 2] = 1
    kernel = scipy.ndimage.gaussian_filter1d(impulse, std)
    kernel = kernel[kernel > 0.01]
    return kernel / kernel.sum()


@pytest.mark.parametrize("std", [0.1, 0.5, 1.0, 2.0, 3.3, 8.0])
def test_kernel_is_the_originals(std):
    np.testing.assert_allclose(gaussian_kernel(std, 100), reference_kernel(std, 100), rtol=1e-12)


def test_kernel_has_nine_taps_at_the_original_setting_and_is_bounded_by_its_window():
    assert len(gaussian_kernel(2.0, 100)) == 9
    assert len(gaussian_kernel(2.0, 5)) == 5
    assert len(gaussian_kernel(2.0, 6)) == 5  # symmetric, hence odd
    assert gaussian_kernel(2.0, 1) == (1.0,)
    assert sum(gaussian_kernel(2.0, 5)) == pytest.approx(1)


@pytest.mark.parametrize(("std", "size"), [(0.0, 100), (-1.0, 100), (2.0, 0), (60.0, 1000)])
def test_impossible_kernels_are_refused(std, size):
    with pytest.raises(ValueError, match="smooth"):
        gaussian_kernel(std, size)


@pytest.mark.parametrize("bins", [1, 3, 9, 60])
@pytest.mark.parametrize(("std", "size"), [(2.0, 100), (1.0, 100), (5.0, 11)])
def test_smoothing_is_a_convolution_of_the_same_length(bins, std, size):
    features = normal(3, bins, 5)
    out = gaussian_smooth(features, std, size)
    kernel = np.array(gaussian_kernel(std, size))
    half = len(kernel) // 2
    for trial in range(3):
        for channel in range(5):
            expected = np.convolve(features[trial, :, channel].numpy(), kernel)[half : half + bins]
            np.testing.assert_allclose(out[trial, :, channel].numpy(), expected, atol=1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_smoothing_in_other_dtypes(dtype, tolerance):
    features = normal(2, 40, 8, dtype)
    out = gaussian_smooth(features, 2.0, 100)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), gaussian_smooth(features.double(), 2.0, 100), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("causal", [False, True])
def test_smoothing_passes_gradients(causal):
    features = torch.randn(1, 12, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gaussian_smooth(x, 1.0, 100, causal), features)


# ---- causal


def test_the_causal_kernel_is_the_half_up_to_the_bin_and_sums_to_one():
    past, future = smoothing_taps(2.0, 100, causal=True)
    weights = [math.exp(-0.5 * (offset / 2) ** 2) for offset in range(5)]
    assert future == () and past == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-12)
    past, future = smoothing_taps(2.0, 100, causal=False)
    assert (*future[::-1], *past) == gaussian_kernel(2.0, 100)


@pytest.mark.parametrize("bins", [1, 3, 60])
@pytest.mark.parametrize(("std", "size"), [(2.0, 100), (5.0, 11), (0.1, 100)])
def test_causal_smoothing_is_the_formula(bins, std, size):
    features = normal(2, bins, 3)
    out = gaussian_smooth(features, std, size, causal=True)
    taps, _ = smoothing_taps(std, size, causal=True)
    for t in range(bins):
        expected = sum(taps[k] * features[:, t - k] for k in range(min(len(taps), t + 1)))
        torch.testing.assert_close(out[:, t], expected, rtol=0, atol=1e-14)


@given(bins=st.integers(2, 30), at=st.integers(1, 29), std=st.sampled_from([0.5, 2.0, 8.0]))
def test_no_later_bin_matters_to_causal_smoothing(bins, at, std):
    features = normal(1, bins, 2)
    changed = features.clone()
    changed[:, min(at, bins - 1) :] = 1e6
    before, after = (
        gaussian_smooth(each, std, 100, causal=True)[:, : min(at, bins - 1)] for each in (features, changed)
    )
    assert torch.equal(before, after)
    assert torch.equal(
        gaussian_smooth(features[:, :at], std, 100, causal=True),
        gaussian_smooth(features, std, 100, causal=True)[:, :at],
    )
