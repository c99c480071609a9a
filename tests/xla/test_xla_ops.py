"""The XLA operations against torch's own on the CPU: values, gradients, and nothing left to the host."""

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.modules.rnn import GRU as TorchGRU

import xla_ops
from backend import XlaWatch
from recurrent import GRU, Projection
from rnn_model import make_patches
from xla_loop import At, time_loop

XLA = torch.device("xla")


def furthest(found, expected):
    """Largest difference, relative to the expected tensor's largest magnitude."""
    return ((found.cpu().double() - expected.double()).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def run(module, x, state, out_weights):
    """Outputs, last states, and the gradients of input, state and parameters, of a weighted sum of the first two."""
    x, state = x.clone().requires_grad_(), state.clone().requires_grad_()
    outputs, last = module(x, state)
    ((outputs * out_weights).sum() + last.sin().sum()).backward()
    torch_xla.sync()
    return [outputs.detach(), last.detach(), x.grad, state.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("large", [1, 10**9], ids=["for large weights", "for small weights"])
@pytest.mark.parametrize(
    ("n_steps", "n_trials", "width", "hidden", "n_layers"), [(1, 1, 3, 2, 1), (2, 3, 8, 5, 2), (33, 4, 20, 12, 3)]
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_the_recurrent_layer_equals_torch_nn_gru(
    n_steps, n_trials, width, hidden, n_layers, dtype, tolerance, large, monkeypatch
):
    monkeypatch.setattr(xla_ops, "LARGE", large)
    torch.manual_seed(n_steps)
    expected = TorchGRU(width, hidden, n_layers).double()
    ours = GRU(width, hidden, n_layers)
    ours.gru.load_state_dict(expected.state_dict())
    ours = ours.to(dtype).to(XLA)
    ours.h0.requires_grad_(False)
    x = torch.randn(n_steps, n_trials, width, dtype=torch.float64)
    state, weights = torch.randn(n_layers, n_trials, hidden).double(), torch.randn(n_steps, n_trials, hidden).double()
    found = run(ours, *(t.to(dtype).to(XLA) for t in (x, state, weights)))
    for value, reference in zip([v for v in found if v is not None], run(expected, x, state, weights), strict=True):
        assert furthest(value, reference) < tolerance
    with torch.no_grad():  # a loop of its own where the weights are large
        without_gradients = ours(x.to(dtype).to(XLA), state.to(dtype).to(XLA))
    for value, reference in zip(without_gradients, found, strict=False):
        assert furthest(value, reference) < tolerance


@pytest.mark.parametrize("large", [1, 10**9])
def test_in_bf16_the_recurrent_layer_stays_as_close_as_bf16_allows(large, monkeypatch):
    monkeypatch.setattr(xla_ops, "LARGE", large)
    torch.manual_seed(0)
    expected = TorchGRU(16, 12, 2)
    ours = GRU(16, 12, 2)
    ours.gru.load_state_dict(expected.state_dict())
    ours = ours.to(XLA)
    ours.h0.requires_grad_(False)
    x, state, weights = torch.randn(40, 4, 16), torch.randn(2, 4, 12), torch.randn(40, 4, 12)
    with torch.autocast("xla", dtype=torch.bfloat16):
        found = run(ours, x.to(XLA), state.to(XLA), weights.to(XLA))
    assert found[0].dtype == torch.bfloat16
    assert all(parameter.dtype == torch.float32 for parameter in ours.parameters())
    for value, reference in zip([v for v in found if v is not None], run(expected, x, state, weights), strict=True):
        assert furthest(value, reference) < 0.03


def test_states_carried_over_give_the_outputs_of_the_whole():
    torch.manual_seed(0)
    ours = GRU(6, 5, 2).double().to(XLA)
    x = torch.randn(12, 3, 6, dtype=torch.float64).to(XLA)
    whole, last = ours(x)
    first, state = ours(x[:7])
    second, state = ours(x[7:], state)
    assert furthest(torch.cat([first, second]), whole.detach().cpu()) < 1e-12
    assert furthest(state, last.detach().cpu()) < 1e-12


def test_a_projection_is_added_without_being_formed():
    torch.manual_seed(0)
    module = GRU(9, 4, 2).double()
    x, hidden = torch.randn(7, 3, 9).double(), torch.randn(7, 3, 2).double()
    weight, bias = torch.randn(9, 2).double(), torch.randn(9).double()
    results = []
    for device in ("cpu", "xla"):
        module.to(device).zero_grad()
        leaves = [t.detach().to(device).requires_grad_() for t in (x, hidden, weight, bias)]
        plus = Projection(*leaves[1:]).negative()
        value = module(leaves[0], plus=plus)[0].sin().sum() + module(None, plus=plus)[0].cos().sum()
        value = value + plus.mean_square().sum()
        value.backward()
        torch_xla.sync()
        results.append([value.detach(), *(t.grad for t in (*leaves, *module.parameters()))])
    for on_cpu, on_xla in zip(*results, strict=True):
        assert furthest(on_xla, on_cpu) < 1e-12
    formed = Projection(hidden, weight, bias)
    torch.testing.assert_close(formed.mean_square(), formed.signal().square().mean(-1))


def ctc_on(device, logits, labels, lengths, label_lengths):
    logits = logits.detach().to(device).requires_grad_()
    arguments = (labels.to(device), lengths.to(device), label_lengths.to(device))
    log_probs = logits.log_softmax(-1)
    if device == "cpu":
        losses = F.ctc_loss(log_probs, *arguments, reduction="none")
        F.ctc_loss(log_probs, *arguments, reduction="none", zero_infinity=True).sum().backward()
    else:
        losses = xla_ops.ctc_loss(log_probs, *arguments)
        losses.sum().backward()
        torch_xla.sync()
    return losses.detach().cpu(), logits.grad.cpu()


FRAMES, TRIALS, CLASSES, LABELS = 11, 6, 5, 7  # one shape, so that XLA compiles once


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ctc_equals_torchs_in_value_and_gradient(data):
    """Random, doubled, empty, full-length and infeasible targets, in few classes, so that each comes often."""
    draw_label = st.integers(1, data.draw(st.integers(1, CLASSES - 1)))
    labels = torch.tensor(data.draw(st.lists(draw_label, min_size=TRIALS * LABELS, max_size=TRIALS * LABELS)))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, FRAMES), min_size=TRIALS, max_size=TRIALS)))
    label_lengths = torch.tensor(data.draw(st.lists(st.integers(0, LABELS), min_size=TRIALS, max_size=TRIALS)))
    torch.manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(FRAMES, TRIALS, CLASSES) * data.draw(st.sampled_from([0.1, 1.0, 10.0]))
    arguments = (logits, labels.view(TRIALS, LABELS), lengths, label_lengths)
    (expected, expected_grad), (found, found_grad) = (ctc_on(device, *arguments) for device in ("cpu", "xla"))
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    expected_grad[lengths[None] <= torch.arange(FRAMES)[:, None]] = 0  # torch's are arbitrary beyond the end
    torch.testing.assert_close(found_grad, expected_grad, rtol=1e-4, atol=1e-5)


def test_ctc_with_no_labels_at_all_and_with_an_impossible_class():
    torch.manual_seed(0)
    logits = torch.randn(9, 2, 5)
    lengths, none = torch.tensor([9, 7]), torch.zeros(2, dtype=torch.int64)
    for labels, label_lengths in (
        (torch.zeros(2, 0, dtype=torch.int64), none),
        (torch.tensor([[1, 2], [2, 1]]), none + 2),
    ):
        (expected, _), (found, grad) = (ctc_on(d, logits, labels, lengths, label_lengths) for d in ("cpu", "xla"))
        torch.testing.assert_close(found, expected)
        logits[:, :, 4] = -torch.inf  # for the second: a class that no label needs
    assert grad.isfinite().all()


def test_ctc_of_a_nan_is_a_nan_and_not_an_impossible_target():
    logits = torch.randn(9, 2, 5)
    logits[4, 1] = torch.nan
    lengths, labels = torch.tensor([9, 9]), torch.tensor([[1, 2], [2, 1]])
    found, grad = ctc_on("xla", logits, labels, lengths, torch.tensor([2, 2]))
    assert found[0].isfinite() and found[1].isnan()
    assert grad[:, 0].isfinite().all() and grad[:, 1].isnan().any()


def test_ctc_of_long_trials_is_as_exact_as_torchs():
    torch.manual_seed(0)
    logits, labels = torch.randn(300, 3, 41) * 3, torch.randint(1, 41, (3, 60))
    arguments = labels, torch.tensor([300, 220, 61]), torch.tensor([60, 5, 30])
    loss, grad = ctc_on("cpu", logits.double(), *arguments)
    errors = {}
    for device in ("cpu", "xla"):
        found, found_grad = ctc_on(device, logits, *arguments)
        errors[device] = (found_grad - grad).abs().max()
        torch.testing.assert_close(found.double(), loss, rtol=1e-5, atol=0)
    assert errors["xla"] <= errors["cpu"] < 1e-3


def test_patches_and_their_gradient_are_those_of_the_cpu():
    x = torch.randn(2, 29, 3, dtype=torch.float64)
    results = []
    for device in ("cpu", "xla"):
        leaf = x.clone().to(device).requires_grad_()
        patches = make_patches(leaf, 14, 4)
        patches.sin().sum().backward()
        results.append((patches.detach().cpu(), leaf.grad.cpu()))
    for on_cpu, on_xla in zip(*results, strict=True):
        torch.testing.assert_close(on_xla, on_cpu)


def test_layer_and_loss_compile_once_and_never_leave_the_device():
    watch, module = XlaWatch(), GRU(8, 6, 2).to(XLA)
    labels, lengths = torch.ones(3, 2).long(), torch.full((3,), 9)
    for step in range(4):
        x = torch.randn(9, 3, 8).to(XLA).requires_grad_()
        arguments = [t.to(XLA) for t in (labels, lengths - step, torch.full((3,), 2))]
        xla_ops.ctc_loss(module(x)[0].log_softmax(-1), *arguments).sum().backward()
        module.zero_grad()
        del x
        torch_xla.sync(wait=True)
        if step == 0:
            before = watch.counts()
    after = watch.counts()
    assert after["compilations"] == before["compilations"]
    assert after["host_fallbacks"] == before["host_fallbacks"]
    assert after["transfers_from_device"] == before["transfers_from_device"]


def test_a_loop_reads_and_writes_where_it_is_told():
    def step(state, inputs, constants):
        (total,), (value, before), (factor,) = state, inputs, constants
        total = total + value * factor
        return [total], [total + before]

    x = torch.arange(24.0).view(4, 2, 3)
    out = torch.zeros(2, 5, 2)
    out[:, 0] = 100.0
    for reverse in (False, True):
        (total,), (_, written) = time_loop(
            f"test {reverse}", step, [torch.zeros(2, 2).to(XLA)], [x.to(XLA), out.to(XLA)],
            [At(0, start=1, size=2), At(1, axis=1)], [At(1, axis=1, offset=1)], [torch.tensor(2.0).to(XLA)], 4, reverse,
        )  # fmt: skip
        expected, sums = out.clone(), torch.zeros(2, 2)
        for t in (3, 2, 1, 0) if reverse else range(4):
            sums = sums + 2 * x[t, :, 1:]
            expected[:, t + 1] = sums + expected[:, t]
        assert torch.equal(total.cpu(), sums)
        assert torch.equal(written.cpu(), expected)


def test_a_step_that_uses_what_it_was_not_given_is_refused():
    hidden = torch.ones(3).to(XLA)
    with pytest.raises(ValueError, match="not given"):
        time_loop("leaky", lambda s, x, c: ([s[0] + hidden], []), [torch.zeros(3).to(XLA)], [], [], [], [], 2)
