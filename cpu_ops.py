"""What the decoder is made of, for CPUs: GRU layers, under the names of xla_ops.py, dropout and softsign.

torch.nn.GRU lets autograd record every step, so that each of them adds its own (3H, H) product to the gradient of the
recurrent weight. Here those are one product after the loop, and what does not depend on the gradient that comes from
later steps is computed for several steps at once. benchmarks/bench_step.py measures what that gains.

Axes: P output frames, B trials, H hidden units. Gates in torch's order: reset, update, new.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

__all__ = ["dropout", "gru_layer", "keep_as", "linear", "materialised", "softsign"]

STEPS_AT_ONCE = 16  # of backward's coefficients: few enough to stay in the processor's cache


def keep_as(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight in another dtype."""
    return weight.to(dtype)


def materialised(x: torch.Tensor) -> torch.Tensor:
    """x: here it is computed once in any case."""
    return x


def dropout(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    """As torch.nn.functional.dropout, whose Bernoulli numbers take four times as long as uniform ones."""
    if not training or p == 0:
        return x
    draws = torch.rand(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))  # bf16 has too few numbers
    return x * (draws >= p).to(x.dtype).div_(1 - p) if p < 1 else x * 0


def softsign(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + |x|), as torch.nn.functional.softsign, in float32 with one new array in place of three."""
    if torch.promote_types(x.dtype, torch.float32) != x.dtype:
        return F.softsign(x)  # the gradient from a rounded result would be wrong by a percent
    return _Softsign.apply(x)


class _Softsign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x):
        y = x.abs().add_(1)
        torch.div(x, y, out=y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):
        (y,) = ctx.saved_tensors
        slope = y.abs().neg_().add_(1)  # its square is 1 / (1 + |x|)^2
        return slope.mul_(slope).mul_(grad)


def gru_layer(projected: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """One GRU layer, as torch.nn.GRU computes it, from inputs that are projected already.

    In float32 at least, whatever the dtype of the arguments.

    Args:
        projected: (P, B, 3H), the inputs times weight_ih plus bias_ih; the dtype of the outputs. It is overwritten.
        weight, bias: weight_hh (3H, H) and bias_hh (3H,).
        start: (B, H).
    Returns:
        (P, B, H); its last row is the last state.
    """
    narrow = projected.dtype
    wide = torch.promote_types(narrow, torch.float32)
    projected, weight, bias, start = (each.to(wide) for each in (projected, weight, bias, start))
    if torch.is_grad_enabled():
        return _GRULayer.apply(projected, weight, bias, start).to(narrow)
    return _run(projected, weight, bias, start, None)[1:].to(narrow)


def _run(
    projected: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, start: torch.Tensor, kept: torch.Tensor | None
) -> torch.Tensor:
    """States (P + 1, B, H), the start first. `projected` becomes the gates, `kept` what goes through the reset gate."""
    n_hidden = start.shape[1]
    states = start.new_empty(projected.shape[0] + 1, *start.shape)
    states[0] = start
    state, products, weight = states[0], torch.empty_like(projected[0]), weight.t()
    to_reset_update, to_new = products[:, : 2 * n_hidden], products[:, 2 * n_hidden :]
    # Once for all steps, and not with each product, for which torch would copy it to every row before.
    projected[..., : 2 * n_hidden] += bias[: 2 * n_hidden]
    new_bias = bias[2 * n_hidden :]
    for t, gates in enumerate(projected.unbind()):
        torch.mm(state, weight, out=products)
        to_new += new_bias
        reset_update, new = gates[:, : 2 * n_hidden], gates[:, 2 * n_hidden :]
        reset_update.add_(to_reset_update).sigmoid_()
        if kept is not None:
            kept[t] = to_new
        new.addcmul_(gates[:, :n_hidden], to_new).tanh_()
        state = torch.lerp(new, state, gates[:, n_hidden : 2 * n_hidden], out=states[t + 1])
    return states


class _GRULayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected, weight, bias, start):
        kept = start.new_empty(projected.shape[0], *start.shape)
        states = _run(projected, weight, bias, start, kept)
        ctx.save_for_backward(projected, weight, kept, states)
        return states[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):
        gates, weight, kept, states = ctx.saved_tensors
        n_steps, n_trials, n_hidden = grad.shape
        # Of what goes into the gates, from the state's side and from the input's: they differ in the new gate, which
        # the reset gate separates from the state.
        d_state_side = torch.empty_like(gates)
        d_new = torch.empty_like(grad)
        d_state = torch.zeros_like(states[0])
        for end in range(n_steps, 0, -STEPS_AT_ONCE):
            steps = slice(max(0, end - STEPS_AT_ONCE), end)
            reset, update, new = gates[steps].unflatten(2, (3, n_hidden)).unbind(2)
            through_new = (1 - update) * (1 - new * new)
            factors = torch.stack(
                [
                    through_new * kept[steps] * (reset * (1 - reset)),
                    (states[steps] - new) * (update * (1 - update)),
                    through_new * reset,
                ],
                dim=2,
            )  # (steps, B, 3, H)
            totals = d_new[steps]
            for t in reversed(range(len(totals))):
                step = steps.start + t
                total = torch.add(grad[step], d_state, out=totals[t])
                torch.mul(total[:, None], factors[t], out=d_state_side[step].view(n_trials, 3, n_hidden))
                d_state = torch.addmm(total * update[t], d_state_side[step], weight)
            totals.mul_(through_new)
        rows = d_state_side.view(n_steps * n_trials, 3 * n_hidden)
        d_weight = rows.t() @ states[:-1].reshape(n_steps * n_trials, n_hidden)
        d_bias = rows.sum(0)
        d_state_side[..., 2 * n_hidden :] = d_new
        return d_state_side, d_weight, d_bias, d_state
