"""What runs over time on XLA: the GRU layers and CTC, in the loops of xla_loop.py, and the products around them.

Imported only where XLA is used. torch_xla unrolls torch's own GRU and sends `F.ctc_loss` to the host. Here everything
that can leave the loop does, and what stays is shaped after the cost model of the TPU v5e compiler, which charges
about 2,000 cycles for each fused operation of a loop's body, however small: few operations a step, whatever they
compute (see RESULTS.md for what it says of each variant).

Axes: P steps (output frames), B trials, H hidden units, C classes, S labels, G = 3 gates (reset, update, new).
"""

from typing import Any

import torch
import torch.nn.functional as F
import torch_xla.core.xla_model as xm

from xla_loop import At, time_loop

LARGE = 2048  # hidden units from which reading the weights, and not the number of operations, is a step's time
LOG_ZERO = -1e30  # finite, since -inf - -inf is NaN
_ones: dict[tuple, torch.Tensor] = {}
dropout = F.dropout


# ---- GRU ---------------------------------------------------------------------------------------------------------


def gru_layer(projected: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """One GRU layer, as torch.nn.GRU computes it, from inputs that are projected already.

    Products are in the dtype of the arguments; gates, and the state from step to step, in float32 at least.

    Args:
        projected: (P, B, 3H), the inputs times weight_ih plus bias_ih; the dtype of the outputs.
        weight, bias: weight_hh (3H, H) and bias_hh (3H,), of any dtype.
        start: (B, H), of any dtype.
    Returns:
        (P, B, H); its last row is the last state.
    """
    if weight.shape[1] >= LARGE and torch.is_grad_enabled():
        return _LargeGRULayer.apply(projected, weight, bias, start)
    return _GRULayer.apply(projected, keep_as(weight, projected.dtype), keep_as(bias, projected.dtype), start)


class _GRULayer(torch.autograd.Function):
    """See `gru_layer`.

    In backward the gates are computed again from the outputs, for all steps at once, as the factors by which
    the gradient of h[t] is multiplied on its way to each gate. That leaves the loop with one product a step; the
    gradients of weights and inputs are products over all P * B rows after it.
    """

    @staticmethod
    def forward(ctx: Any, projected, weight, bias, start):
        n_steps, hidden, dtype = projected.shape[0], start.shape[-1], projected.dtype
        # Row 0 is the start state and row t + 1 the output of step t, so that backward has h[t - 1] at no cost.
        states = start.new_zeros((n_steps + 1, *start.shape), dtype=dtype)
        weights = _gate_weights(weight, projected, transposed=True) if hidden >= LARGE else [weight.t()]
        gates = [At(0, start=gate * hidden, size=hidden) for gate in range(3)]
        _, (_, states) = time_loop(
            "gru", _gru_step, [start.to(_wide(dtype))], [projected, states], gates, [At(1, offset=1)],
            [*weights, bias, _half(projected)], n_steps,
        )  # fmt: skip
        states[:1] = start[None].to(dtype)  # after the loop: written before, it would hold fast memory until then
        ctx.save_for_backward(projected, weight, bias, states)
        ctx.start_dtype = start.dtype
        return states[1:]

    @staticmethod
    def backward(ctx: Any, d_outputs):
        projected, weight, bias, states = ctx.saved_tensors
        n_steps, batch, _ = projected.shape
        hidden, dtype, wide = weight.shape[1], projected.dtype, _wide(projected.dtype)
        before = states.view(-1, hidden)[: n_steps * batch]
        to_r, to_z, to_m, to_n, z = _gate_factors(projected.view(n_steps * batch, -1), before, weight, bias)
        factors = torch.stack([to_r, to_z, to_m])
        to_r, to_z, to_m = factors  # not kept twice
        factors = factors.view(3, n_steps, batch, hidden)
        z, by_gate = z.view(n_steps, batch, hidden), weight.view(3, hidden, hidden)
        # At index t the loop hands the gradient of h[t + 1] on to h[t] and leaves it in the place of d_outputs[t].
        (first,), (_, _, d) = time_loop(
            "gru_backward", _gru_backward_step, [d_outputs[-1].to(wide)], [factors, z, d_outputs.to(wide)],
            [At(0, axis=1, offset=1), At(1, offset=1), At(2)], [At(2)], [by_gate], n_steps - 1, reverse=True,
        )  # fmt: skip
        nothing = torch.zeros_like(first)
        (d_start,), _ = _gru_backward_step([first], [factors[:, 0], z[0], nothing], [by_gate])
        d = d.reshape(n_steps * batch, hidden)
        d_r, d_z, d_m, d_n = ((d * factor.to(wide)).to(dtype) for factor in (to_r, to_z, to_m, to_n))
        d_weight = torch.cat([d_r, d_z, d_m], -1).t() @ before
        d_bias = torch.cat([sum_rows(d_r), sum_rows(d_z), sum_rows(d_m)])
        d_projected = torch.cat([d_r, d_z, d_n], -1).view_as(projected)
        return d_projected, d_weight, d_bias, d_start.to(ctx.start_dtype)


class _LargeGRULayer(torch.autograd.Function):
    """See `gru_layer`: the same for layers whose weights do not fit into a TPU's fast memory.

    A step then takes as long as its weights take to be read, and what else it does is nearly free: the factors that
    `_GRULayer` computes in backward are left by the forward loop. `_gate_weights` keeps a third from being read.
    """

    @staticmethod
    def forward(ctx: Any, projected, weight, bias, start):
        n_steps, hidden, dtype = projected.shape[0], start.shape[-1], projected.dtype
        states = start.new_zeros((n_steps + 1, *start.shape), dtype=dtype)
        to_r, to_z, to_m, to_n, z = (torch.zeros_like(states[1:]) for _ in range(5))
        gates = [At(0, start=gate * hidden, size=hidden) for gate in range(3)]
        _, (_, states, *factors) = time_loop(
            "large gru", _large_gru_step, [start.to(_wide(dtype))],
            [projected, states, to_r, to_z, to_m, to_n, z], gates,
            [At(1, offset=1), *(At(number) for number in range(2, 7))],
            [*_gate_weights(weight, projected, transposed=True), bias.to(dtype), _half(projected)], n_steps,
        )  # fmt: skip
        states[:1] = start[None].to(dtype)
        ctx.save_for_backward(*factors, weight, states)
        ctx.start_dtype, ctx.bias_dtype = start.dtype, bias.dtype
        return states[1:]

    @staticmethod
    def backward(ctx: Any, d_outputs):
        to_r, to_z, to_m, to_n, z, weight, states = ctx.saved_tensors
        n_steps, batch, hidden = d_outputs.shape
        dtype, wide = d_outputs.dtype, _wide(d_outputs.dtype)
        arrays = [to_r, to_z, to_m, z]
        weights = _gate_weights(weight, d_outputs)
        (first,), (*_, d) = time_loop(
            "large gru backward", _large_gru_backward_step, [d_outputs[-1].to(wide)], [*arrays, d_outputs],
            [*(At(number, offset=1) for number in range(4)), At(4)], [At(4)], weights, n_steps - 1, reverse=True,
        )  # fmt: skip
        at_start = [*(array[0] for array in arrays), torch.zeros_like(first)]
        (d_start,), _ = _large_gru_backward_step([first], at_start, weights)
        d = d.to(wide)
        d_r, d_z, d_m, d_n = ((d * factor.to(wide)).to(dtype) for factor in (to_r, to_z, to_m, to_n))
        # In one piece: put together within the products, they would take half as long again.
        d_gates, d_projected = torch.cat([d_r, d_z, d_m], -1), torch.cat([d_r, d_z, d_n], -1)
        xm.optimization_barrier_([d_gates])
        xm.optimization_barrier_([d_projected])
        d_gates = d_gates.view(-1, 3 * hidden)
        before = states.view(-1, hidden)[: n_steps * batch]
        d_weight = (d_gates.t() @ before).to(weight.dtype)
        return d_projected, d_weight, sum_rows(d_gates).to(ctx.bias_dtype), d_start.to(ctx.start_dtype)


def _gate_weights(weight: torch.Tensor, before: torch.Tensor, transposed: bool = False) -> list[torch.Tensor]:
    """The weights of the three gates in the dtype of `before`, made no earlier than it.

    Three arrays, since the compiler puts into fast memory (128 MiB) only whole arrays that the program makes: a third
    of the weights of 7,168 units fits, and a step then reads two thirds.
    """
    one = _one(weight).clone()
    xm.optimization_barrier_([before, one])
    weights = [(gate * one).to(before.dtype) for gate in weight.chunk(3)]
    weights = [weight.t() for weight in weights] if transposed else weights
    xm.optimization_barrier_(weights)
    return weights


def _gru_step(state: list, inputs: list, constants: list) -> tuple[list, list]:
    (h,), (*weights, bias, half) = state, constants
    h_r, h_z, h_n = _recurrent_gates(h, weights, bias)
    h, *_ = _gru_cell(h, [i.to(h.dtype) for i in inputs], [h_r, h_z, h_n], half)
    return [h], [h.to(bias.dtype)]


def _large_gru_step(state: list, inputs: list, constants: list) -> tuple[list, list]:
    (before,), (*weights, bias, half) = state, constants
    h_r, h_z, h_n = _recurrent_gates(before, weights, bias)
    h, r, z, n = _gru_cell(before, [i.to(before.dtype) for i in inputs], [h_r, h_z, h_n], half)
    return [h], [value.to(bias.dtype) for value in (h, *_factors(before, r, z, n, h_n), z)]


def _recurrent_gates(h: torch.Tensor, weights: list, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What h adds to the gates, by one weight (H, 3H) or by three (H, H)."""
    biases = bias.chunk(len(weights))
    products = [torch.matmul(h.to(bias.dtype), weight) + b for weight, b in zip(weights, biases, strict=True)]
    gates = products if len(products) == 3 else products[0].chunk(3, -1)
    return tuple(gate.to(h.dtype) for gate in gates)


def _gru_cell(h: torch.Tensor, inputs: list, recurrent: list, half: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The next h, and the gates r, z and n."""
    (i_r, i_z, i_n), (h_r, h_z, h_n) = inputs, recurrent
    r, z = _sigmoid(i_r + h_r, half), _sigmoid(i_z + h_z, half)
    n = torch.tanh(i_n + r * h_n)
    return n + z * (h - n), r, z, n


def _factors(before, r, z, n, h_n) -> tuple[torch.Tensor, ...]:
    """What the gradient of h[t] is multiplied by on its way to r, z, m and n.

    r and z mean what goes into these gates, m the recurrent part of the new gate and n all that goes into it.
    """
    to_n = (1 - z) * (1 - n * n)
    return to_n * h_n * r * (1 - r), (before - n) * z * (1 - z), to_n * r, to_n


def _gru_backward_step(state: list, inputs: list, constants: list) -> tuple[list, list]:
    """From the gradient of h[t + 1] to that of h[t]: on a TPU one fused product."""
    (d,), (factors, z, d_output), (by_gate,) = state, inputs, constants
    d_gates = (d[None] * factors.to(d.dtype)).to(by_gate.dtype)
    through_gates = torch.einsum("gbh,ghk->bk", d_gates, by_gate).to(d.dtype)
    d = d_output.to(d.dtype) + (d * z.to(d.dtype) + through_gates)
    return [d], [d.to(d_output.dtype)]


def _large_gru_backward_step(state: list, inputs: list, constants: list) -> tuple[list, list]:
    (d,), (*factors, z, d_output) = state, inputs
    d_gates = [(d * factor.to(d.dtype)).to(constants[0].dtype) for factor in factors]
    # Else computed within each product, which then waits for it instead of for its weight.
    xm.optimization_barrier_(d_gates)
    through = [d_gate @ weight for d_gate, weight in zip(d_gates, constants, strict=True)]
    d = d_output.to(d.dtype) + (d * z.to(d.dtype) + sum(t.to(d.dtype) for t in through))
    return [d], [d.to(d_output.dtype)]


def _gate_factors(projected, before, weight, bias) -> tuple[torch.Tensor, ...]:
    """`_factors` and the z gate of all steps at once; each (P * B, H)."""
    hidden, wide, half = weight.shape[1], _wide(projected.dtype), _half(projected)
    # Gate by gate: three products of which the rest takes whole results, not slices.
    rows = [slice(gate * hidden, (gate + 1) * hidden) for gate in range(3)]
    inputs = [projected[:, row].to(wide) for row in rows]
    recurrent = [(before @ weight[row].t() + bias[row]).to(wide) for row in rows]
    _, r, z, n = _gru_cell(before.to(wide), inputs, recurrent, half)
    found = [*_factors(before.to(wide), r, z, n, recurrent[2]), z]
    found = [factor.to(projected.dtype) for factor in found]
    xm.optimization_barrier_(found)  # else the compiler computes all of this again for each product that uses it
    return tuple(found)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What gates are computed in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _half(like: torch.Tensor) -> torch.Tensor:
    return torch.full((), 0.5, dtype=_wide(like.dtype), device=like.device)


def _sigmoid(x: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """By tanh, which a TPU has as an instruction, where a sigmoid costs an exponential and a division."""
    return torch.tanh(x * half) * half + half


def keep_as(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight in another dtype, converted once: else the compiler may convert it within each product that uses it."""
    return weight if weight.dtype == dtype else _KeepAs.apply(weight, dtype)


def materialised(x: torch.Tensor) -> torch.Tensor:
    """x as it is, computed once: else the compiler may compute it again within each product that uses it."""
    return _KeepAs.apply(x, x.dtype)


def _one(like: torch.Tensor) -> torch.Tensor:
    """1, in a form that the compiler does not know to be 1."""
    key = (like.device, like.dtype)
    if key not in _ones:
        _ones[key] = torch.ones(1, dtype=like.dtype).to(like.device)
    return _ones[key]


class _KeepAs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight, dtype):
        ctx.dtype = weight.dtype
        # A multiplication and a conversion in one are half the time of the conversion alone, by a TPU's compiler.
        kept = [weight if weight.dtype == dtype else (weight * _one(weight)).to(dtype)]
        xm.optimization_barrier_(kept)
        return kept[0]

    @staticmethod
    def backward(ctx: Any, d):
        return d.to(ctx.dtype), None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x (..., I) times weight (O, I) transposed plus bias (O,); the gradient of the bias by `sum_rows`."""
    return _Linear.apply(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, d):
        x, weight = ctx.saved_tensors
        rows = d.reshape(-1, d.shape[-1])
        return d @ weight, rows.t() @ x.reshape(-1, x.shape[-1]), sum_rows(rows)


def sum_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum of the rows of x (N, H), accumulated in float32: as a product it runs on a TPU's matrix unit."""
    return (x.new_ones((8, x.shape[0])) @ x)[0]  # 8 rows, the height of a register, cost what 1 does


# ---- CTC ---------------------------------------------------------------------------------------------------------


def ctc_loss(
    log_probs: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor, label_lengths: torch.Tensor
) -> torch.Tensor:
    """Negative log-likelihood of each trial's labels, as F.ctc_loss gives it, with blank 0.

    Args:
        log_probs: (P, B, C) float32 or float64.
        labels: (B, S) integers, padded with any class.
        lengths: (B,) valid frames.
        label_lengths: (B,) valid labels.
    Returns:
        (B,) losses: infinite, with a gradient of zero, where the labels do not fit into the frames.
    """
    if labels.shape[1] == 0:
        labels = labels.new_zeros((len(labels), 1))
    # An impossible class is -inf, which the lookup of emissions would multiply by zero. (clamp would hide a NaN here.)
    log_probs = torch.maximum(log_probs, torch.full_like(log_probs, LOG_ZERO))
    return _CTCLoss.apply(log_probs, labels.int(), lengths.int(), label_lengths.int())


class _CTCLoss(torch.autograd.Function):
    """Forward and backward variables of Graves et al. (ICML 2006) as one recurrence over both, in one loop.

    The states are the labels with a blank before, between and after them, L = 2S + 1. A row before the first
    state holds the start, so that the first frame is a step like any other. The backward variables are the same
    recurrence with time and states reversed, and stand in the second half of the batch. The gradient (minus the
    posterior of each class) comes from the two, and nothing is differentiated through the loop. States go down the
    rows and trials across them, (P, L + 1, 2B): a shift by a state is then cheap on a TPU.

    Emissions are looked up by a product with a one-hot matrix: gather and scatter take a TPU's compiler minutes.
    The product is of float32, which a TPU rounds to bf16 unless its precision is 'highest', as backend.py sets it.
    """

    @staticmethod
    def forward(ctx: Any, log_probs, labels, lengths, label_lengths):
        n_steps, batch, n_classes = log_probs.shape
        width, device = labels.shape[1], log_probs.device
        n_states = 2 * width + 1

        def filled(value: float, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=log_probs.dtype, device=device)

        zero, never = filled(0.0), filled(LOG_ZERO)
        blanks = torch.zeros_like(labels)
        states = torch.cat([torch.stack([blanks, labels], 2).reshape(batch, -1), blanks[:, :1]], 1)  # (B, L)
        one_hot = states[:, :, None] == torch.arange(n_classes, device=device, dtype=torch.int32)
        one_hot = one_hot.to(log_probs.dtype)
        emissions = torch.matmul(one_hot, log_probs.permute(1, 2, 0)).permute(2, 1, 0)  # (P, L, B)

        number = torch.arange(n_states, device=device, dtype=torch.int32)[:, None]
        frame = torch.arange(n_steps, device=device, dtype=torch.int32)[:, None]
        last_state = 2 * label_lengths
        alive = (frame < lengths)[:, None]  # (P, 1, B)
        allowed = alive & (number <= last_state)  # (P, L, B)
        reachable = torch.where(allowed, emissions, never)

        # A label may follow the one before it without a blank, unless they are equal.
        repeated = torch.cat([labels[:, :1] == labels[:, :1], labels[:, 1:] == labels[:, :-1]], 1)
        skip = torch.stack([filled(LOG_ZERO, batch, width), torch.where(repeated, never, zero)], 2)
        skip = torch.cat([skip.reshape(batch, -1).t(), filled(LOG_ZERO, 1, batch)])  # (L, B): into s from s - 2

        # Forward: row 0 is the start, from which states 0 and 1 are reached.
        row = torch.arange(n_states + 1, device=device, dtype=torch.int32)[:, None]
        dead = filled(LOG_ZERO, n_steps, 1, batch)
        forward_emissions = torch.cat([dead, reachable], 1)
        forward_skip = torch.cat([filled(LOG_ZERO, 1, batch), torch.where(number == 1, zero, skip)])
        forward_start = torch.where(row == 0, zero, never).expand(-1, batch)
        # Backward: state s is row L - s, and the end, which waits for a trial's last frame, the one before
        # state last_state.
        end = row == (n_states - 1 - last_state)
        backward_emissions = torch.cat([reachable, dead], 1).flip(1)
        backward_emissions = torch.where(end & ~alive, zero, backward_emissions).flip(0)
        backward_skip = torch.cat([skip[2:], filled(LOG_ZERO, 3, batch)]).flip(0)
        backward_skip = torch.where(row == (n_states + 1 - last_state), zero, backward_skip)
        backward_start = torch.where(end, zero, never)

        both = torch.cat([forward_emissions, backward_emissions], 2)  # (P, L + 1, 2B)
        start, skips = torch.cat([forward_start, backward_start], 1), torch.cat([forward_skip, backward_skip], 1)
        _, (_, both) = time_loop(
            "ctc", _ctc_step, [start], [both, torch.zeros_like(both)], [At(0)], [At(1)], [skips], n_steps
        )
        alpha, beta = both[:, 1:, :batch], both[..., batch:].flip((0, 1))[:, :-1]

        ends = (number == last_state) | (number == last_state - 1)
        at_end = torch.where((frame == lengths - 1)[:, None] & ends, alpha, never)
        highest = at_end.amax((0, 1))
        log_likelihood = highest + torch.log(torch.exp(at_end - highest).sum((0, 1)))
        fits = ~(log_likelihood <= LOG_ZERO / 2)  # a NaN in the logits stays one
        # Both variables hold the emission of their frame. The sum over a frame's states is the likelihood in every
        # frame; dividing by each frame's own takes out most of the rounding that long sums have gathered.
        posterior = torch.where(allowed, alpha + beta - emissions, never).softmax(1)
        posterior = torch.where(allowed & fits, posterior, zero)
        ctx.save_for_backward(torch.matmul(posterior.permute(2, 0, 1), one_hot).transpose(0, 1))
        infinite = torch.where((lengths == 0) & (label_lengths == 0), zero, filled(float("inf")))
        return torch.where(fits, -log_likelihood, infinite)

    @staticmethod
    def backward(ctx: Any, d_loss):
        (posterior,) = ctx.saved_tensors
        return -posterior * d_loss[:, None], None, None, None


def _ctc_step(state: list, inputs: list, constants: list) -> tuple[list, list]:
    (here,), (emission,), (skip,) = state, inputs, constants
    from_1 = F.pad(here, (0, 0, 1, -1), value=LOG_ZERO)  # shifted by one: a single operation, unlike a cat of slices
    from_2 = F.pad(here, (0, 0, 2, -2), value=LOG_ZERO) + skip
    highest = torch.maximum(torch.maximum(here, from_1), from_2)
    total = torch.exp(here - highest) + torch.exp(from_1 - highest) + torch.exp(from_2 - highest)
    here = highest + torch.log(total) + emission
    return [here], [here]
