"""The CPU's GRU layer is torch's, in values and gradients; its dropout is dropout; a noise estimate kept as factors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.modules.rnn import GRU as TorchGRU

import cpu_ops
from recurrent import GRU, Projection


def results(module, x, state, weights):
    """Outputs, last states, and the gradients of input, state and parameters of a function of both."""
    x, state = x.clone().requires_grad_(), state.clone().requires_grad_()
    outputs, last = module(x, state)
    ((outputs * weights).sum() + last.sin().sum()).backward()
    return [outputs.detach(), last.detach(), x.grad, state.grad, *(p.grad for p in module.parameters())]


@settings(max_examples=25, deadline=None)
@given(
    n_steps=st.sampled_from([1, 2, cpu_ops.STEPS_AT_ONCE, cpu_ops.STEPS_AT_ONCE + 1, 40]),
    n_trials=st.integers(1, 4), width=st.integers(1, 9), hidden=st.integers(1, 7), n_layers=st.integers(1, 3),
)  # fmt: skip
def test_the_layers_are_torch_s_in_values_and_gradients(n_steps, n_trials, width, hidden, n_layers):
    torch.manual_seed(n_steps)
    expected = TorchGRU(width, hidden, n_layers).double()
    ours = GRU(width, hidden, n_layers).double()
    ours.gru.load_state_dict(expected.state_dict())
    ours.h0.requires_grad_(False)
    given = [
        torch.randn(size).double()
        for size in ((n_steps, n_trials, width), (n_layers, n_trials, hidden), (n_steps, n_trials, hidden))
    ]
    found = [value for value in results(ours, *given) if value is not None]
    for value, reference in zip(found, results(expected, *given), strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-12)


def test_without_gradients_the_outputs_are_the_same_bits():
    torch.manual_seed(0)
    module, x = GRU(6, 5, 2), torch.randn(37, 3, 6)
    outputs, last = module(x)
    with torch.no_grad():
        for value, expected in zip(module(x), (outputs, last), strict=True):
            assert torch.equal(value, expected)


def test_bf16_is_computed_in_float32():
    torch.manual_seed(0)
    module, x = GRU(6, 5, 1), torch.randn(37, 3, 6)
    expected, _ = module(x)
    module = module.bfloat16()
    outputs, _ = module(x.bfloat16())
    assert outputs.dtype == torch.bfloat16
    torch.testing.assert_close(outputs.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("p", [0.003, 0.4])
def test_in_bf16_dropout_has_its_share_and_softsign_its_gradient(p):
    torch.manual_seed(0)
    dropped = cpu_ops.dropout(torch.ones(1_000_000, dtype=torch.bfloat16), p, training=True) == 0
    assert dropped.float().mean().item() == pytest.approx(p, rel=0.1)
    x = (10 * torch.randn(1000)).bfloat16().requires_grad_()
    found = [torch.autograd.grad(function(x).sum(), x)[0] for function in (cpu_ops.softsign, F.softsign)]
    assert torch.equal(*found)


def test_no_trials_have_no_gradient():
    module = GRU(3, 4, 2)
    module(torch.randn(5, 0, 3))[0].sum().backward()
    assert not any(parameter.grad.any() for parameter in module.gru.parameters())


@pytest.mark.parametrize("p", [0.1, 0.4, 0.9])
def test_dropout_drops_the_share_it_is_asked_for_and_keeps_the_mean(p):
    torch.manual_seed(0)
    x = torch.full((500, 400), 3.0, requires_grad=True)
    y = cpu_ops.dropout(x, p, training=True)
    assert (y == 0).float().mean().item() == pytest.approx(p, abs=0.01)
    assert y.mean().item() == pytest.approx(3.0, rel=0.03)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 3 / (1 - p)))
    y.sum().backward()
    torch.testing.assert_close(x.grad * 3, y.detach())


def test_softsign_is_torch_s_in_value_and_gradient():
    torch.manual_seed(0)
    x = (torch.randn(50, 40).double() * 3).requires_grad_()
    weights = torch.randn(50, 40).double()
    found = [(y, *torch.autograd.grad((y * weights).sum(), x)) for y in (cpu_ops.softsign(x), F.softsign(x))]
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def test_dropout_of_all_and_of_none():
    x = torch.randn(5, 4)
    assert not cpu_ops.dropout(x, 1.0, training=True).any()
    assert cpu_ops.dropout(x, 0.0, training=True) is x and cpu_ops.dropout(x, 0.5, training=False) is x


@pytest.mark.parametrize("with_signal", [True, False])
def test_a_signal_kept_as_its_factors_is_added_as_if_formed(with_signal):
    torch.manual_seed(0)
    module = GRU(9, 4, 2).double()
    signal, hidden = torch.randn(7, 3, 9).double(), torch.randn(7, 3, 2).double()
    weight, bias = torch.randn(9, 2).double(), torch.randn(9).double()
    found = []
    for formed in (False, True):
        own = copy.deepcopy(module)
        leaves = [each.clone().requires_grad_() for each in (signal, hidden, weight, bias)]
        plus = Projection(*leaves[1:]).negative()
        x = leaves[0] if with_signal else None
        if formed:
            x, plus = plus.signal() if x is None else x + plus.signal(), None
        own(x, plus=plus)[0].sin().sum().backward()
        found.append([each.grad for each in (*leaves[1 - with_signal :], *own.parameters())])
    for kept, formed in zip(*found, strict=True):
        torch.testing.assert_close(kept, formed, rtol=1e-10, atol=1e-12)


def test_factors_are_kept_where_there_are_many_rows():
    factors = [Projection(torch.randn(n_frames, 4, 3), torch.randn(20, 3), torch.randn(20)) for n_frames in (2, 3)]
    few, many = (each.kept_or_formed() for each in factors)
    assert many is factors[1]
    torch.testing.assert_close(few, factors[0].signal())
