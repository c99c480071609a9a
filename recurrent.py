"""The GRU layer of every model here: torch.nn.GRU's parameters, one learnable start state, consistent dtypes.

Which implementation runs depends on the device: cuDNN's through torch on CUDA, cpu_ops.py on a CPU, xla_ops.py on XLA.
The parameters are the same, under the same names, so that a checkpoint of one device is a checkpoint of every device.

Axes: P output frames (patches), B trials, L layers, H hidden units, W width of the input, K width of its factors.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

# Not `torch.nn.GRU`: importing torch_xla replaces that name, process-wide, by a version that fails on CPU tensors.
from torch.nn.modules.rnn import GRU as TorchGRU


class Projection(NamedTuple):
    """The signal hidden @ weight.T + bias, kept as its factors: hidden (P, B, K), weight (W, K), bias (W,).

    Where K is much less than W, what follows is cheaper to compute from the factors than from the signal.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor

    def signal(self) -> torch.Tensor:
        """(P, B, W)."""
        return F.linear(self.hidden, self.weight, self.bias)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Projection":
        """With `function` applied to each factor."""
        return Projection(*(function(factor) for factor in self))

    def kept_or_formed(self) -> "torch.Tensor | Projection":
        """What follows is best computed from: the signal on CUDA, whose GRU is cuDNN's, else the factors if it is long.

        Moving the weights of what follows through the factors costs as much for one frame as for all. On a CPU that
        pays from 2 K rows on where gradients are computed and 4.5 K where not, about, with two readers of 3 K gates.
        """
        n_frames, n_trials, n_factors = self.hidden.shape
        device = self.hidden.device.type
        if device == "xla" or (device == "cpu" and n_frames * n_trials >= 4 * n_factors):
            return self
        return self.signal()

    def negative(self) -> "Projection":
        """Of the opposite sign."""
        return Projection(self.hidden, -self.weight, -self.bias)

    def mean_square(self) -> torch.Tensor:
        """(P, B), the mean over W of the squared signal, at the price of a K x K matrix."""
        hidden, weight, bias = self.hidden, self.weight, self.bias[:, None].to(self.weight.dtype)
        squares = (torch.matmul(hidden, weight.t() @ weight) * hidden).sum(-1)
        crossed = torch.matmul(hidden, (weight.t() @ bias).to(hidden.dtype))[..., 0]
        return (squares + 2 * crossed + bias.square().sum()) / weight.shape[0]


class GRU(nn.Module):
    """Stacked unidirectional GRU over (P, B, W) with a learnable start state shared by its layers.

    Parameters are those of torch.nn.GRU, under its names (`weight_ih_l0`, ...). Input weights start as Xavier
    uniform, recurrent weights orthogonal (as in Card et al. 2024), biases as in torch.nn.GRU.

    Args:
        input_size: W.
        hidden_size: H, units a layer.
        num_layers: L.
        dropout: between layers, in training only.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden_size, self.num_layers, self.dropout = hidden_size, num_layers, dropout
        self.gru = TorchGRU(
            input_size,
            hidden_size,
            num_layers,
            dropout=dropout if num_layers > 1 else 0.0,  # torch warns of a dropout that acts on no layer
        )
        for name, parameter in self.gru.named_parameters():
            if "weight_hh" in name:
                nn.init.orthogonal_(parameter)
            elif "weight_ih" in name:
                nn.init.xavier_uniform_(parameter)
        self.h0 = nn.Parameter(nn.init.xavier_uniform_(torch.zeros(1, 1, hidden_size)))

    def forward(
        self, x: torch.Tensor | None, state: torch.Tensor | None = None, plus: Projection | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers from `state`, or from the learnable start state.

        Args:
            x: (P, B, W); None where the input is `plus` alone.
            state: (L, B, H), the last states of the piece before; None at the start of a trial.
            plus: a signal to be added to x; but on CUDA it is never formed.
        Returns:
            outputs of the last layer (P, B, H) and the last state of every layer (L, B, H).
        """
        given = plus.hidden if x is None else x
        if state is None:
            state = self.h0.expand(self.num_layers, given.shape[1], self.hidden_size).contiguous()
        # Input, state and weights must agree: autocast leaves a bf16 input beside float32 weights.
        dtype = _compute_dtype(given, self.gru.weight_hh_l0)
        if given.device.type == "cuda":
            if plus is not None:
                x = plus.signal() if x is None else x + plus.signal()
            return self.gru(x.to(dtype), state.to(dtype))
        if given.device.type == "xla":
            import xla_ops as ops
        else:
            import cpu_ops as ops
        return self._run_layers(ops, x, state, plus, dtype)

    def _run_layers(
        self,
        ops: ModuleType,
        x: torch.Tensor | None,
        state: torch.Tensor,
        plus: Projection | None,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, last_states = None, []
        for layer in range(self.num_layers):
            names = (f"{kind}_l{layer}" for kind in ("weight_ih", "bias_ih", "weight_hh", "bias_hh"))
            weight_ih, bias_ih, weight_hh, bias_hh = (getattr(self.gru, name) for name in names)
            weight_ih, bias_ih = ops.keep_as(weight_ih, dtype), ops.keep_as(bias_ih, dtype)
            if layer > 0:
                x, plus = ops.materialised(ops.dropout(outputs, self.dropout, self.training)), None
            projected = None if x is None else ops.linear(x.to(dtype), weight_ih, bias_ih)
            if plus is not None:
                # (hidden Wp' + bp) W' = hidden (W Wp)' + W bp: two small products in place of two wide ones.
                hidden, weight, bias = (factor.to(dtype) for factor in plus)
                moved = torch.matmul(weight_ih, torch.cat([weight, bias[:, None]], 1))
                moved_bias = moved[:, -1] + bias_ih if projected is None else moved[:, -1]
                moved = ops.linear(hidden, moved[:, :-1], moved_bias)
                projected = moved if projected is None else projected + moved
            outputs = ops.gru_layer(projected, weight_hh, bias_hh, state[layer])
            last_states.append(outputs[-1])
        return outputs, torch.stack(last_states)


def _compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The autocast dtype where autocast is on, else that of the weights."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
