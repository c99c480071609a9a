"""CTC: lengths, feasibility, the loss against an enumeration of all paths, and greedy decoding."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctc import ctc_loss, greedy_collapse, greedy_decode, output_lengths, required_frames


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 10))
def test_output_lengths_counts_the_patches_that_fit(n_bins, size, stride):
    starts = [start for start in range(0, n_bins, stride) if start + size <= n_bins]
    assert output_lengths(n_bins, size, stride) == len(starts)
    assert output_lengths(np.array([n_bins]), size, stride).tolist() == [len(starts)]
    assert output_lengths(torch.tensor([n_bins]), size, stride).tolist() == [len(starts)]


def test_without_patching_every_bin_is_a_frame():
    assert output_lengths(17, 0, 4) == 17


@given(st.lists(st.integers(1, 3), max_size=4), st.integers(1, 5))
def test_the_loss_is_finite_exactly_where_the_labels_fit(labels, frames):
    loss = ctc_loss(
        torch.zeros(1, frames, 4), torch.tensor([[*labels, 0]]), torch.tensor([frames]), torch.tensor([len(labels)])
    )
    assert torch.isfinite(loss).item() == (required_frames(labels) <= frames)


@pytest.mark.parametrize("labels", [[], [1], [1, 1], [1, 2], [2, 2, 1]])
def test_the_loss_is_the_sum_over_all_paths(labels):
    frames, classes = 5, 3
    logits = torch.randn(1, frames, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probabilities = logits[0].softmax(-1)
    total = sum(
        torch.prod(torch.stack([probabilities[t, c] for t, c in enumerate(path)]))
        for path in itertools.product(range(classes), repeat=frames)
        if greedy_collapse(path) == labels
    )
    loss = ctc_loss(logits, torch.tensor([[*labels, 0]]), torch.tensor([frames]), torch.tensor([len(labels)]))
    assert loss.item() == pytest.approx(-total.log().item(), abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_give_a_float32_loss(dtype):
    loss = ctc_loss(torch.randn(2, 9, 5).to(dtype), torch.ones(2, 3).long(), torch.tensor([9, 9]), torch.tensor([3, 1]))
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss).all()


def test_repeats_are_merged_before_blanks_are_removed():
    assert greedy_collapse([31, 31, 0, 31, 0, 5]) == [31, 31, 5]
    assert greedy_collapse([]) == []
    assert greedy_collapse([0, 0]) == []


@given(st.lists(st.integers(1, 5), max_size=20), st.data())
def test_collapsing_a_path_of_the_labels_gives_the_labels(labels, data):
    path = [0] * data.draw(st.integers(0, 2))
    for label in labels:
        blanks = data.draw(st.integers(int(path[-1:] == [label]), 2))
        path += [0] * blanks + [label] * data.draw(st.integers(1, 3))
    assert greedy_collapse(path) == labels


def test_greedy_decoding_does_not_look_beyond_a_trials_frames():
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 1, 0, 2, 3, 3], [4, 0, 4, 0, 0, 1]]), 5).float()
    assert greedy_decode(logits, torch.tensor([4, 5])) == [[1, 2], [4, 4]]
    assert greedy_decode(logits, torch.tensor([0, 6])) == [[], [4, 4, 1]]
