"""Each augmentation's distribution, what padding must not do, and that every option is seen."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_augmentations import (
    channel_masks,
    constant_offset,
    gaussian_smooth,
    random_cut,
    random_walk,
    static_gain,
    time_masks,
    transform_data,
    white_noise,
    zero_padding,
)

OFF = dict.fromkeys(("white_noise_std", "constant_offset_std", "random_walk_std", "static_gain_std"), 0.0)
OFF |= {"random_cut": 0, "random_walk_axis": 1, "n_time_masks": 0, "time_mask_bins": 4}
OFF |= {"n_channel_masks": 0, "channel_mask_size": 4}
OFF |= {"smooth_data": False, "smooth_kernel_std": 2.0, "smooth_kernel_size": 100, "smooth_causal": False}
EACH = {
    "white noise": {"white_noise_std": 1.0},
    "constant offset": {"constant_offset_std": 0.2},
    "walk over time": {"random_walk_std": 0.1},
    "walk over channels": {"random_walk_std": 0.1, "random_walk_axis": -1},
    "static gain": {"static_gain_std": 0.3},
    "random cut": {"random_cut": 3},
    "time masks": {"n_time_masks": 2},
    "channel masks": {"n_channel_masks": 2},
    "smoothing": {"smooth_data": True},
}
ALL = {key: value for options in EACH.values() for key, value in options.items()} | {"random_walk_axis": 1}


def transforms(**options):
    return SimpleNamespace(**{**OFF, **options})


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(lengths, bins, channels, dtype=torch.float64, seed=0):
    """Normal features, zero beyond each trial's length, and the lengths."""
    n_time_steps = torch.tensor(lengths)
    features = torch.randn(len(lengths), bins, channels, generator=seeded(seed), dtype=dtype)
    return zero_padding(features, n_time_steps), n_time_steps


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item()


# Distributions


def test_white_noise_is_apart_for_every_bin_and_channel():
    noise = white_noise(torch.full((8, 200, 32), 5.0), 0.7, seeded()) - 5.0
    assert noise.mean().item() == pytest.approx(0, abs=0.015)
    assert noise.std().item() == pytest.approx(0.7, rel=0.02)
    for axis in range(3):
        neighbours = [noise.narrow(axis, start, noise.shape[axis] - 1) for start in (0, 1)]
        assert abs(correlation(*neighbours)) < 0.02
    kurtosis = (noise / 0.7).pow(4).mean().item()
    assert kurtosis == pytest.approx(3, abs=0.2)


def test_constant_offset_is_shared_over_time_only():
    offset = constant_offset(torch.zeros(64, 5, 128), 0.2, seeded())
    assert torch.equal(offset, offset[:, :1].expand_as(offset))
    assert offset[:, 0].mean().item() == pytest.approx(0, abs=0.01)
    assert offset[:, 0].std().item() == pytest.approx(0.2, rel=0.05)
    assert abs(correlation(offset[:, 0, 1:], offset[:, 0, :-1])) < 0.05
    assert abs(correlation(offset[1:, 0], offset[:-1, 0])) < 0.05


def test_static_gain_is_one_factor_a_trial_and_channel():
    features = torch.rand(64, 5, 128, generator=seeded(1), dtype=torch.float64) + 1
    gain = static_gain(features, 0.3, seeded()) / features
    torch.testing.assert_close(gain, gain[:, :1].expand_as(gain))
    assert gain[:, 0].mean().item() == pytest.approx(1, abs=0.02)
    assert gain[:, 0].std().item() == pytest.approx(0.3, rel=0.05)
    assert abs(correlation(gain[:, 0, 1:], gain[:, 0, :-1])) < 0.05
    assert abs(correlation(gain[1:, 0], gain[:-1, 0])) < 0.05


@pytest.mark.parametrize("axis", [1, -1])
def test_random_walk_runs_along_its_axis(axis):
    walk = random_walk(torch.zeros(64, 100, 100, dtype=torch.float64), 0.1, axis, seeded())
    along, other = (1, 2) if axis == 1 else (2, 1)
    steps = walk.diff(dim=along)
    assert steps.mean().item() == pytest.approx(0, abs=0.001)
    assert steps.std().item() == pytest.approx(0.1, rel=0.02)
    assert abs(correlation(steps.narrow(along, 0, 98), steps.narrow(along, 1, 98))) < 0.01
    for position in (0, 24, 99):  # the variance of a sum of n steps is n times that of one
        at = walk.select(along, position)
        assert at.std().item() == pytest.approx(0.1 * (position + 1) ** 0.5, rel=0.05)
    # Correlation of the walk at m and n steps: sqrt(m / n) along its axis, none across.
    early, late = walk.select(along, 24), walk.select(along, 99)
    assert correlation(early, late) == pytest.approx(0.5, abs=0.03)
    assert abs(correlation(walk.narrow(other, 0, 99), walk.narrow(other, 1, 99))) < 0.05


def test_random_cut_takes_each_length_as_often_and_for_each_trial_apart():
    features = torch.arange(1.0, 11.0)[None, :, None].expand(4000, 10, 2) * torch.tensor([1.0, 100.0])
    n_time_steps = torch.full((4000,), 10)
    out, left = random_cut(features, n_time_steps, 4, seeded())
    assert out.shape == features.shape
    cuts = n_time_steps - left
    assert cuts.unique().tolist() == [0, 1, 2, 3]
    assert (torch.bincount(cuts) / 4000 - 0.25).abs().max() < 0.03
    assert abs(correlation(cuts[1:].double(), cuts[:-1].double())) < 0.05
    for cut in range(4):
        expected = torch.cat([features[0, cut:], torch.zeros(cut, 2)])
        assert (out[cuts == cut] == expected).all()


def test_random_cut_leaves_a_bin_of_a_short_trial_and_none_of_an_empty_one():
    features, n_time_steps = batch([1, 2, 0] * 50, 4, 3)
    out, left = random_cut(features, n_time_steps, 10, seeded())
    assert left.view(50, 3)[:, 0].tolist() == [1] * 50
    assert set(left.view(50, 3)[:, 1].tolist()) == {1, 2}
    assert left.view(50, 3)[:, 2].tolist() == [0] * 50
    assert torch.equal(out[::3, 0], features[::3, 0])
    assert torch.equal(out, zero_padding(out, left))


def runs(masked):
    """Lengths and starts of the single run of True in each row of (B, N); starts of empty rows are left out."""
    lengths = masked.sum(1)
    starts = masked.long().argmax(1)
    position = torch.arange(masked.shape[1])
    assert torch.equal(masked, (position >= starts[:, None]) & (position < (starts + lengths)[:, None]))
    return lengths, starts[lengths > 0]


def test_time_mask_has_even_lengths_and_even_starts_over_the_valid_bins():
    n_time_steps = torch.full((6000,), 20)
    features = zero_padding(torch.ones(6000, 50, 3), n_time_steps)
    out = time_masks(features, n_time_steps, 1, 5, seeded())
    masked = (out == 0) & (features == 1)
    assert torch.equal(masked, masked[..., :1].expand_as(masked))
    lengths, _ = runs(masked[..., 0])
    assert (torch.bincount(lengths, minlength=6) / 6000 - 1 / 6).abs().max() < 0.02
    _, starts = runs(masked[lengths == 5, :, 0])
    assert len(torch.bincount(starts)) == 16  # a mask of 5 fits 16 times into 20 bins
    assert (torch.bincount(starts) / len(starts) - 1 / 16).abs().max() < 0.03


def test_channel_mask_has_even_lengths_and_even_starts_over_the_channels():
    out = channel_masks(torch.ones(6000, 3, 12), 1, 4, seeded())
    masked = out == 0
    assert torch.equal(masked, masked[:, :1].expand_as(masked))
    lengths, _ = runs(masked[:, 0])
    assert (torch.bincount(lengths, minlength=5) / 6000 - 1 / 5).abs().max() < 0.02
    _, starts = runs(masked[lengths == 4, 0])
    assert len(torch.bincount(starts)) == 9
    assert (torch.bincount(starts) / len(starts) - 1 / 9).abs().max() < 0.04


def test_several_masks_are_drawn_apart_and_a_mask_longer_than_the_trial_fits():
    n_time_steps = torch.full((2000,), 100)
    one = (time_masks(torch.ones(2000, 100, 1), n_time_steps, 1, 10, seeded()) == 0).float().mean().item()
    four = (time_masks(torch.ones(2000, 100, 1), n_time_steps, 4, 10, seeded()) == 0).float().mean().item()
    assert one == pytest.approx(0.05, rel=0.05)
    assert four == pytest.approx(1 - (1 - 0.05) ** 4, rel=0.05)
    features, n_time_steps = batch([3, 1, 0] * 20, 8, 2)
    masked = (time_masks(features, n_time_steps, 1, 50, seeded()) == 0) & (features != 0)
    assert masked.view(20, 3, 8, 2)[:, 0, :3].all(1).any()


# The law of padding


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    extra=st.integers(0, 12),
    channels=st.integers(4, 9),
    options=st.sets(st.sampled_from(sorted(EACH))),
    training=st.booleans(),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_padding_is_exactly_zero_whatever_is_switched_on(lengths, extra, channels, options, training, seed, dtype):
    features, n_time_steps = batch(lengths, max(lengths) + extra + 1, channels, dtype)
    chosen = {key: value for name in options for key, value in EACH[name].items()}
    kept, kept_lengths = features.clone(), n_time_steps.clone()
    out, left = transform_data(features, n_time_steps, transforms(**chosen), training, seeded(seed))
    assert out.shape == features.shape
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert left.dtype == n_time_steps.dtype
    assert torch.equal(out, zero_padding(out, left))
    assert (left <= n_time_steps).all()
    assert (left >= n_time_steps.clamp(max=1)).all()
    assert torch.equal(features, kept), "the input was changed"
    assert torch.equal(n_time_steps, kept_lengths), "the lengths were changed"


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    extra=st.integers(0, 30),
    channels=st.integers(1, 9),
    std=st.sampled_from([0.5, 2.0, 4.0]),
    causal=st.booleans(),
)
def test_evaluation_does_not_depend_on_padding_or_company(length, extra, channels, std, causal):
    features, n_time_steps = batch([length, length + extra], length + extra, channels)
    chosen = transforms(**{**ALL, "smooth_kernel_std": std, "smooth_causal": causal})
    alone, _ = transform_data(features[:1, :length], n_time_steps[:1], chosen, training=False)
    together, left = transform_data(features, n_time_steps, chosen, training=False)
    assert torch.equal(together[0, :length], alone[0])
    assert torch.equal(left, n_time_steps)


@pytest.mark.parametrize("name", ["time masks", "channel masks", "constant offset", "static gain"])
def test_training_does_not_depend_on_padding_where_a_draw_is_for_a_trial(name):
    short, n_time_steps = batch([15, 9], 15, 8)
    long = torch.cat([short, torch.zeros(2, 20, 8, dtype=torch.float64)], dim=1)
    first, _ = transform_data(short, n_time_steps, transforms(**EACH[name]), True, seeded())
    second, _ = transform_data(long, n_time_steps, transforms(**EACH[name]), True, seeded())
    assert torch.equal(first, second[:, :15])


# transform_data


@pytest.mark.parametrize("name", sorted(EACH))
def test_every_option_is_seen_and_the_same_seed_gives_the_same(name):
    features, n_time_steps = batch([30, 22, 30], 36, 8, dtype=torch.float32)
    off, _ = transform_data(features, n_time_steps, transforms(), True, seeded())
    on, left = transform_data(features, n_time_steps, transforms(**EACH[name]), True, seeded())
    again, left_again = transform_data(features, n_time_steps, transforms(**EACH[name]), True, seeded())
    assert torch.equal(off, features)
    assert not torch.equal(on, off)
    assert torch.equal(on, again)
    assert torch.equal(left, left_again)
    if name != "smoothing":
        other, _ = transform_data(features, n_time_steps, transforms(**EACH[name]), True, seeded(1))
        assert not torch.equal(on, other)
        evaluation, _ = transform_data(features, n_time_steps, transforms(**EACH[name]), False)
        assert torch.equal(evaluation, features)


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ({"n_time_masks": 1}, {"time_mask_bins": 12}),
        ({"n_channel_masks": 1}, {"channel_mask_size": 8}),
        ({"smooth_data": True}, {"smooth_kernel_std": 1.0}),
        ({"smooth_data": True}, {"smooth_kernel_size": 5}),
        ({"smooth_data": True}, {"smooth_causal": True}),
        ({"random_walk_std": 0.1}, {"random_walk_axis": -1}),
        ({"random_cut": 3}, {"random_cut": 9}),
        ({"n_time_masks": 1}, {"n_time_masks": 3}),
        ({"n_channel_masks": 1}, {"n_channel_masks": 3}),
    ],
)
def test_a_changed_option_is_seen(base, change):
    features, n_time_steps = batch([30] * 8, 30, 10)
    before, _ = transform_data(features, n_time_steps, transforms(**base), True, seeded())
    after, _ = transform_data(features, n_time_steps, transforms(**{**base, **change}), True, seeded())
    assert not torch.equal(before, after)


def test_a_given_generator_leaves_the_global_state_alone_and_none_uses_it():
    features, n_time_steps = batch([30, 22], 36, 8)
    state = torch.get_rng_state()
    transform_data(features, n_time_steps, transforms(**ALL), True, seeded())
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    first, _ = transform_data(features, n_time_steps, transforms(**ALL), True, None)
    second, _ = transform_data(features, n_time_steps, transforms(**ALL), True, None)
    torch.manual_seed(3)
    third, _ = transform_data(features, n_time_steps, transforms(**ALL), True, None)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("causal", [False, True])
def test_smoothing_comes_last_and_is_the_same_in_training_and_evaluation(causal):
    features, n_time_steps = batch([30, 22], 36, 8)
    smoothed = transforms(smooth_data=True, smooth_causal=causal)
    training, _ = transform_data(features, n_time_steps, smoothed, True, seeded())
    evaluation, _ = transform_data(features, n_time_steps, smoothed, False)
    assert torch.equal(training, evaluation)
    noisy, left = transform_data(features, n_time_steps, transforms(**{**ALL, "smooth_data": False}), True, seeded())
    both, _ = transform_data(features, n_time_steps, transforms(**ALL, smooth_causal=causal), True, seeded())
    assert torch.equal(both, zero_padding(gaussian_smooth(noisy, 2.0, 100, causal), left))


def test_lengths_on_the_host_stay_there_and_the_features_on_their_device():
    """As on CUDA, where CTC would otherwise wait for them. The meta device has shapes only."""
    options = transforms(random_cut=3, n_time_masks=1, smooth_data=True)
    before = torch.tensor([30, 20, 9, 1])
    features, after = transform_data(torch.empty(4, 30, 5, device="meta"), before, options, True)
    assert features.device.type == "meta" and features.shape == (4, 30, 5)
    assert after.device.type == "cpu" and all(0 <= cut < 3 for cut in (before - after).tolist())


def test_a_cut_drawn_on_the_host_is_that_of_the_seed():
    """A generator of another device stands for its seed."""

    class OfAnotherDevice:
        device = torch.device("cuda")

        def initial_seed(self):
            return 7

    features, lengths = batch([30, 20, 9, 1], 30, 5)
    expected = random_cut(features, lengths, 10, seeded(7))
    found = random_cut(features, lengths, 10, OfAnotherDevice())
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
