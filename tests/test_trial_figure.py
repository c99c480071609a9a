"""The picture of a trial."""

import numpy as np
import pytest

from rnn_model import make_patches
from trial_figure import patches_to_bins, trial_figure


@pytest.mark.parametrize(("size", "stride"), [(4, 2), (3, 3), (0, 1), (14, 4)])
def test_undoing_the_patches_of_a_signal_gives_the_signal(size, stride):
    import torch

    bins = np.random.default_rng(0).normal(size=(size + 5 * stride, 3)).astype(np.float32)
    patches = make_patches(torch.from_numpy(bins)[None], size, stride)[:, 0].numpy()
    np.testing.assert_allclose(patches_to_bins(patches, size, stride), bins, rtol=1e-6)


def test_the_picture_is_drawn_for_any_trial():
    rng = np.random.default_rng(0)
    for frames in (1, 30):
        signal = rng.normal(size=(frames, 14 * 8))
        picture = trial_figure(signal, signal / 2, rng.normal(size=(frames, 41)), [1, 2, 40], "a trial", 14, 4)
        assert picture.dtype == np.uint8
        assert picture.shape[2] == 3 and picture.std() > 10
