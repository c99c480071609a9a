"""The model: sizes, modes, padding, streaming, dtypes, gradient reversal."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_config

from config import load_config
from ctc import output_lengths
from rnn_model import DayLayers, GradientReversal, build_model, make_patches

ROOT = Path(__file__).resolve().parent.parent
SINGLE = {"model__architecture": "gru", "adversarial__enabled": False}


def tiny_model(dtype=torch.float64, **overrides):
    torch.manual_seed(0)
    return build_model(tiny_config(**overrides)).to(dtype).eval()


def inputs(n_trials=3, n_bins=21, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(n_trials, n_bins, 6, dtype=torch.float64, generator=generator).to(dtype)
    return features, torch.arange(n_trials) % 3


@pytest.mark.parametrize(
    ("file", "n_parameters"),
    [("rnn_args.yaml", 687_568_466), ("rnn_args_compact.yaml", 86_438_738), ("rnn_args_original.yaml", 44_315_177)],
)
def test_the_shipped_configurations_have_the_documented_number_of_parameters(file, n_parameters):
    with torch.device("meta"):
        model = build_model(load_config(ROOT / file))
    assert sum(parameter.numel() for parameter in model.parameters()) == n_parameters


@pytest.mark.parametrize("day_layers", ["shared", "per_branch"])
@pytest.mark.parametrize("noise_units", [4, 24])
def test_the_modes_return_what_they_say(day_layers, noise_units):
    model = tiny_model(model__day_layers=day_layers, model__noise_units=noise_units)
    features, days = inputs()
    frames = output_lengths(21, 4, 2)
    clean, noisy, noise = model(features, days, mode="full")
    assert clean.shape == noisy.shape == (3, frames, 41)
    assert noise.shape == (3, frames, 24)
    assert torch.equal(model(features, days, mode="inference"), clean)
    power = noise.square().mean(-1)
    for outputs, expected in (("train", (clean, noisy, power)), ("train_clean", (clean, power))):
        torch.testing.assert_close(model(features, days, mode=outputs), expected)
    signal, again = model.denoise(features, days)
    assert torch.equal(again, noise) and signal.shape == noise.shape


def test_inference_never_runs_the_noisy_speech_model():
    model = tiny_model()
    model.noisy_speech_model = None
    assert model(*inputs(), mode="inference").shape[-1] == 41


def test_an_unknown_mode_and_a_trial_shorter_than_a_patch_are_refused():
    model = tiny_model()
    with pytest.raises(ValueError, match="mode"):
        model(*inputs(), mode="denoise")
    with pytest.raises(ValueError, match="fewer than one patch"):
        model(*inputs(n_bins=3))


def test_clean_model_reads_the_signal_minus_the_noise():
    for day_layers in ("shared", "per_branch"):
        model = tiny_model(model__day_layers=day_layers)
        features, days = inputs()
        if day_layers == "per_branch":
            torch.nn.init.normal_(model.noise_day_layers.weights)
        noise_days = model.day_layers if day_layers == "shared" else model.noise_day_layers
        noise, _ = model.noise_model(make_patches(noise_days(features, days), 4, 2))
        signal = make_patches(model.day_layers(features, days), 4, 2)
        noise = noise if isinstance(noise, torch.Tensor) else noise.signal()
        expected, _ = model.clean_speech_model(signal - noise)
        torch.testing.assert_close(model(features, days), expected.transpose(0, 1), rtol=0, atol=1e-12)


def test_patches_hold_their_bins_in_order_of_time():
    x = torch.arange(2 * 11 * 3).reshape(2, 11, 3).float()
    patches = make_patches(x, 4, 3)
    expected = torch.stack([x[:, start : start + 4].reshape(2, -1) for start in (0, 3, 6)])
    assert torch.equal(patches, expected)
    assert torch.equal(make_patches(x, 0, 3), x.transpose(0, 1))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 20))
def test_the_gradient_of_patches_is_that_of_their_slices(size, stride, more):
    x = torch.randn(2, size + more, 3, dtype=torch.float64, requires_grad=True)
    patches = make_patches(x, size, stride)
    weights = torch.randn(patches.shape, dtype=torch.float64)
    starts = range(0, more + 1, stride)
    sliced = torch.stack([x[:, start : start + size].reshape(2, -1) for start in starts])
    assert torch.equal(patches, sliced)
    gradients = (torch.autograd.grad((value * weights).sum(), x)[0] for value in (patches, sliced))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


def test_a_day_layer_applies_the_trials_own_day():
    layers = DayLayers(3, 4).double()
    torch.nn.init.normal_(layers.weights)
    torch.nn.init.normal_(layers.biases)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    for row, day in enumerate([2, 0]):
        value = x[row] @ layers.weights[day] + layers.biases[day]
        torch.testing.assert_close(layers(x, torch.tensor([2, 0]))[row], value / (1 + value.abs()))


@settings(max_examples=20, deadline=None)
@given(st.integers(4, 25), st.integers(0, 30), st.floats(-5, 5))
def test_padding_never_changes_a_trials_logits(n_bins, n_padding, filler):
    model = tiny_model()
    features, days = inputs(n_bins=n_bins)
    padded = torch.cat([features, torch.full((3, n_padding, 6), filler, dtype=torch.float64)], dim=1)
    frames = output_lengths(n_bins, 4, 2)
    for alone, beside in zip(model(features, days, mode="full"), model(padded, days, mode="full"), strict=True):
        torch.testing.assert_close(alone, beside[:, :frames], rtol=0, atol=1e-12)
    model = tiny_model(**SINGLE)
    torch.testing.assert_close(model(features, days), model(padded, days)[:, :frames], rtol=0, atol=1e-12)


@pytest.mark.parametrize("architecture", [{}, SINGLE], ids=["triple_gru", "gru"])
def test_a_trials_logits_are_the_same_alone_and_in_a_batch(architecture):
    model = tiny_model(**architecture)
    features, days = inputs()
    together = model(features, days)
    for row in range(3):
        alone = model(features[row : row + 1], days[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_overlapping_pieces_give_the_logits_of_the_whole(piece_frames):
    size, stride = 4, 2
    features, days = inputs(n_bins=(sum(piece_frames) - 1) * stride + size)
    triple, single = tiny_model(), tiny_model(**SINGLE)
    for model, mode in ((triple, "inference"), (triple, "full"), (single, None)):
        mode = {"mode": mode} if mode else {}
        whole = model(features, days, **mode)
        states, begin, pieces = None, 0, []
        for frames in piece_frames:
            end = begin + (frames - 1) * stride + size
            *outputs, states = model(features[:, begin:end], days, states=states, return_state=True, **mode)
            pieces.append(outputs)
            begin = end - (size - stride)
        for i, expected in enumerate(whole if isinstance(whole, tuple) else (whole,)):
            joined = torch.cat([piece[i] for piece in pieces], dim=1)
            torch.testing.assert_close(joined, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_are_consistent(dtype):
    model = tiny_model(dtype)
    outputs = model(*inputs(dtype=dtype), mode="full")
    assert {output.dtype for output in outputs} == {dtype}
    sum(output.float().sum() for output in outputs).backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {dtype}


def test_autocast_to_bf16_stays_close_to_float32():
    model = tiny_model(torch.float32)
    features, days = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(features, days, mode="full")
    for output, expected in zip(outputs, model(features, days, mode="full"), strict=True):
        torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("grl_lambda", [0.0, 0.5, torch.tensor([2.0])])
def test_gradient_reversal_is_identity_forward_and_minus_lambda_backward(grl_lambda):
    x = torch.randn(3, 4, requires_grad=True)
    y = GradientReversal()(x, grl_lambda)
    assert torch.equal(y, x)
    (y * torch.arange(12.0).reshape(3, 4)).sum().backward()
    torch.testing.assert_close(x.grad, -torch.as_tensor(grl_lambda) * torch.arange(12.0).reshape(3, 4))


def test_start_states_and_weights_are_initialised_as_documented():
    model = tiny_model()
    weight = model.clean_speech_model.recurrent.gru.weight_hh_l1
    torch.testing.assert_close(weight.T @ weight, torch.eye(5, dtype=weight.dtype), rtol=0, atol=1e-6)
    bound = (6 / (24 + 15)) ** 0.5
    assert model.clean_speech_model.recurrent.gru.weight_ih_l0.abs().max() <= bound
    assert model.noise_model.recurrent.h0.shape == (1, 1, 4)
    assert torch.equal(model.day_layers.weights[1], torch.eye(6, dtype=torch.float64))


def test_parts_held_fixed_take_no_gradient():
    def fixed(model):
        return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}

    assert fixed(tiny_model()) == set()
    assert all("day_layers." in name for name in fixed(tiny_model(model__input_network__input_trainable=False)))
    recurrent = fixed(tiny_model(model__rnn_trainable=False))
    assert recurrent and all(".recurrent." in name for name in recurrent)
    assert fixed(tiny_model(**SINGLE, model__rnn_trainable=False, model__n_layers=1)) == {
        "h0", "gru.weight_ih_l0", "gru.weight_hh_l0", "gru.bias_ih_l0", "gru.bias_hh_l0",
    }  # fmt: skip
    outputs = fixed(tiny_model(model__output_trainable=False))
    assert outputs == {
        f"{part}.{kind}"
        for part in ("noise_model.projection", "clean_speech_model.out", "noisy_speech_model.out")
        for kind in ("weight", "bias")
    }
    adversary = fixed(tiny_model(adversarial__enabled=False))
    assert adversary and all(name.startswith("noisy_speech_model.") for name in adversary)
