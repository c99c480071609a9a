"""The GRU layer of every model here: torch.nn.GRU's parameters, one learnable start state, consistent dtypes.

A module of its own so that another implementation can be chosen by device without the models knowing.
"""

import torch
from torch import nn

# Not `torch.nn.GRU`: importing torch_xla replaces that name, process-wide, by a version that fails on CPU tensors.
from torch.nn.modules.rnn import GRU as TorchGRU


class GRU(nn.Module):
    """Stacked unidirectional GRU over (B, P, input) with a learnable start state shared by its layers.

    Parameters are those of torch.nn.GRU, under its names (`weight_ih_l0`, ...). Input weights start as Xavier
    uniform, recurrent weights orthogonal (as in Card et al. 2024), biases as in torch.nn.GRU.

    Args:
        input_size: width of the input.
        hidden_size: H, units a layer.
        num_layers: L.
        dropout: between layers, in training only.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.gru = TorchGRU(
            input_size,
            hidden_size,
            num_layers,
            batch_first=True,
            dropout=dropout if num_layers > 1 else 0.0,  # torch warns of a dropout that acts on no layer
        )
        for name, parameter in self.gru.named_parameters():
            if "weight_hh" in name:
                nn.init.orthogonal_(parameter)
            elif "weight_ih" in name:
                nn.init.xavier_uniform_(parameter)
        self.h0 = nn.Parameter(nn.init.xavier_uniform_(torch.zeros(1, 1, hidden_size)))

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers from `state`, or from the learnable start state.

        Args:
            x: (B, P, input).
            state: (L, B, H), the last states of the piece before; None at the start of a trial.
        Returns:
            outputs of the last layer (B, P, H) and the last state of every layer (L, B, H).
        """
        if state is None:
            state = self.h0.expand(self.num_layers, x.shape[0], self.hidden_size).contiguous()
        # Input, state and weights must agree: autocast leaves a bf16 input beside float32 weights.
        dtype = _compute_dtype(x, self.gru.weight_hh_l0)
        return self.gru(x.to(dtype), state.to(dtype))


def _compute_dtype(x: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
    """The autocast dtype where autocast is on, else that of the weights."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
