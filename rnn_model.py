"""The decoder: a noise estimate is subtracted from the neural signal, and phonemes are read from what is left.

    features (B, T, F) -> day layer -> patches (P, B, patch_size * F) = x
    noise  = NoiseModel(x)
    clean  = CleanSpeechModel(x - noise)                     phoneme logits: the decoder's output
    noisy  = NoisySpeechModel(reverse_gradient(noise))       training only

The NoisySpeechModel tries to read phonemes from the noise estimate. Behind a gradient reversal layer
(Ganin and Lempitsky, ICML 2015) its success teaches the NoiseModel to keep speech out of the noise. Day layers,
patches and the recurrent decoder follow Card et al., NEJM 2024.

GRUDecoder is the single-GRU decoder of that paper, as it was.

Axes: B trials, T time bins of 20 ms, F features, P patches, W = patch_size * F, H hidden units, C classes, D days.
What goes in and comes out of the decoder has its trials first; inside, patches come first, as recurrences want them.
"""

import os
import re
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import cpu_ops
from ctc import output_lengths
from recurrent import GRU, Projection

States = tuple[torch.Tensor, ...]
RECURRENT = re.compile(r"(^|\.)(gru\.|h0$)")  # names of a recurrence's parameters


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, grl_lambda: torch.Tensor | float) -> torch.Tensor:
        ctx.grl_lambda = grl_lambda
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grl_lambda = ctx.grl_lambda
        if isinstance(grl_lambda, torch.Tensor):
            grl_lambda = grl_lambda.to(grad.dtype)
        return -grl_lambda * grad, None


class GradientReversal(nn.Module):
    """Identity forward; the gradient times -grl_lambda backward.

    grl_lambda is a number, or a tensor of one element: on XLA a number that changes between steps would be
    compiled anew at 0 and at 1, a tensor never is.
    """

    def forward(self, x: torch.Tensor, grl_lambda: torch.Tensor | float = 1.0) -> torch.Tensor:
        return _ReverseGradient.apply(x, grl_lambda)


class DayLayers(nn.Module):
    """One affine map and softsign a recording day, for the drift of the signal between days.

    The maps of all days are one stacked tensor, from which a batch takes its own by index: one operation
    whatever the number of days, and a static shape.

    Args:
        n_days: D.
        n_features: F. The maps start as identity, the biases as zero.
        dropout: of the output, in training only.
    """

    def __init__(self, n_days: int, n_features: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.eye(n_features).repeat(n_days, 1, 1))
        self.biases = nn.Parameter(torch.zeros(n_days, 1, n_features))
        self.dropout = dropout

    def forward(self, x: torch.Tensor, day_idx: torch.Tensor) -> torch.Tensor:
        """x (B, T, F), day_idx (B,) integers -> (B, T, F)."""
        weights = self.weights.index_select(0, day_idx)
        biases = self.biases.index_select(0, day_idx)
        x = torch.bmm(x.to(weights.dtype), weights)
        x = x + biases.to(x.dtype) if x.device.type != "cpu" else x.add_(biases.to(x.dtype))
        functions = cpu_ops if x.device.type == "cpu" else F
        return functions.dropout(functions.softsign(x), self.dropout, self.training)


def make_patches(x: torch.Tensor, patch_size: int, patch_stride: int) -> torch.Tensor:
    """Each output frame sees patch_size bins, patch_stride bins after the one before.

    Args:
        x: (B, T, F) with T >= patch_size.
    Returns:
        (P, B, patch_size * F), the bins of a patch in order of time, each with its F features; (T, B, F), x
        itself, where patch_size is 0.
    """
    return x.transpose(0, 1) if patch_size == 0 else _Patches.apply(x, patch_size, patch_stride)


class _Patches(torch.autograd.Function):
    """Slices of x, which is split by phase, so that a patch's bin k is row k // stride of phase k % stride.

    `unfold` leaves the device on XLA; the gradient that autograd makes of 14 strided slices is 14 arrays as long as
    the trial, where the one here adds up the few patches that share a bin.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int, stride: int) -> torch.Tensor:
        n_trials, n_bins, n_features = x.shape
        n_patches, rows = output_lengths(n_bins, size, stride), -(-n_bins // stride)
        ctx.sizes = n_bins, n_patches, rows, size, stride, n_features
        if n_bins % stride:  # padding by nothing would be a copy
            x = F.pad(x, (0, 0, 0, rows * stride - n_bins))
        phases = x.reshape(n_trials, rows, stride, n_features).permute(2, 1, 0, 3)
        return torch.cat([phases[k % stride, k // stride : k // stride + n_patches] for k in range(size)], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        n_bins, n_patches, rows, size, stride, n_features = ctx.sizes
        narrow, wide, phases = grad.dtype, torch.promote_types(grad.dtype, torch.float32), []
        if grad.device.type == "xla":
            import xla_ops

            # In bf16 a TPU's compiler keeps it in fast memory, and the product that makes it takes twice the time.
            grad = xla_ops.keep_as(grad, wide)
        for phase in range(stride):
            total = torch.zeros((), dtype=wide, device=grad.device)
            for k in range(phase, size, stride):
                before = k // stride
                part = grad[..., k * n_features : (k + 1) * n_features]
                total = total + F.pad(part, (0, 0, 0, 0, before, rows - n_patches - before)).to(wide)
            phases.append(total.to(narrow).expand(rows, grad.shape[1], n_features))
        grad_x = torch.stack(phases).permute(2, 1, 0, 3).reshape(-1, rows * stride, n_features)
        return grad_x[:, :n_bins], None, None


class NoiseModel(nn.Module):
    """Estimates the noise in the patched signal.

    With as many units as the patch is wide (the documents' scale) the last GRU layer is the estimate. With fewer
    units a linear projection widens it, at a fraction of the parameters.

    Args:
        width: W, of the patched signal and of the estimate.
        n_units: H.
        n_layers: GRU layers; 2 in the documents.
        dropout: between GRU layers.
    """

    def __init__(self, width: int, n_units: int, n_layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.recurrent = GRU(width, n_units, n_layers, dropout)
        self.projection = None if n_units == width else nn.Linear(n_units, width)
        if self.projection is not None:
            nn.init.xavier_uniform_(self.projection.weight)

    def start_silent(self) -> None:
        """Set the last layer's parameters such that every estimate is zero, and training can still move them."""
        last = f"_l{self.recurrent.num_layers - 1}"
        gru = [parameter for name, parameter in self.recurrent.gru.named_parameters() if name.endswith(last)]
        for parameter in [*gru, self.recurrent.h0] if self.projection is None else self.projection.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | Projection, torch.Tensor]:
        """x (P, B, W) -> noise (P, B, W), or its factors where they are of use; last states (L, B, H)."""
        hidden, state = self.recurrent(x, state)
        if self.projection is None:
            return hidden, state
        return Projection(hidden, self.projection.weight, self.projection.bias).kept_or_formed(), state


class SpeechModel(nn.Module):
    """GRU and linear classifier: phoneme logits from a patched signal.

    Args:
        width: W, of the input.
        n_units: H.
        n_layers: GRU layers.
        n_classes: C.
        dropout: between GRU layers.
    """

    def __init__(self, width: int, n_units: int, n_layers: int, n_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.recurrent = GRU(width, n_units, n_layers, dropout)
        self.out = nn.Linear(n_units, n_classes)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(
        self, x: torch.Tensor | None, state: torch.Tensor | None = None, plus: Projection | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x (P, B, W), or plus, or their sum -> logits (P, B, C), last states (L, B, H)."""
        hidden, state = self.recurrent(x, state, plus)
        return self.out(hidden), state


class CleanSpeechModel(SpeechModel):
    """Reads phonemes from the denoised signal: the decoder proper. 3 GRU layers in the documents."""


class NoisySpeechModel(SpeechModel):
    """Reads phonemes from the noise estimate, as its adversary, while training. 2 GRU layers in the documents."""


class Decoder(nn.Module):
    """What both decoders have: patches of patch_size bins every patch_stride bins, and weights from a checkpoint.

    Attributes:
        sessions, feature_subset: those of the configuration, where `build_model` made it.
    """

    patch_size: int
    patch_stride: int
    sessions: tuple[str, ...] | None = None
    feature_subset: tuple[int, ...] | None = None

    def load_weights(self, model_path: str | os.PathLike) -> None:
        """Take all parameters from a checkpoint of this project or of the original decoder.

        Args:
            model_path: run directory or checkpoint file.
        Raises:
            CheckpointError: it cannot be read, its parameters are not this model's, or what it read was other
                (sessions, or their order, which is that of the day layers; features; patches). Nothing is taken then.
        """
        from checkpointing import CheckpointError, check_parameters, find_checkpoint, load_checkpoint
        from config import config_from_dict

        path, _ = find_checkpoint(model_path)
        checkpoint = load_checkpoint(path)
        check_parameters(self, checkpoint["model_state_dict"], path)
        config = config_from_dict(checkpoint["config"])
        lines = self.other_inputs(config)
        if self.sessions is not None and list(self.sessions) != config.dataset.sessions:
            lines.append(
                "its sessions are others, or in another order: init_from_checkpoint takes their day layers by name"
            )
        if lines:
            raise CheckpointError("\n  - ".join([f"{path}: is of a model that reads its input otherwise:", *lines]))
        self.load_state_dict(checkpoint["model_state_dict"])

    def other_inputs(self, config: Any) -> list[str]:
        """In what a configuration reads the features otherwise than this model: one line each."""
        subset = config.dataset.feature_subset
        theirs = {
            "dataset.feature_subset": None if subset is None else tuple(subset),
            "model.patch_size": config.model.patch_size,
            "model.patch_stride": config.model.patch_stride,
        }
        ours = dict(zip(theirs, (self.feature_subset, self.patch_size, self.patch_stride), strict=True))
        if self.sessions is None:  # of a model that no configuration made, nothing is known
            del theirs["dataset.feature_subset"]
        return [f"{key} is {value} there and {ours[key]} here" for key, value in theirs.items() if value != ours[key]]


class GRUDecoder(Decoder, GRU):
    """The original decoder (Card et al., NEJM 2024): day layers, patches, one GRU, a linear classifier.

    It is a GRU with more before and behind it, so that its parameters have the original's names: `gru.weight_ih_l0`
    to `gru.bias_hh_l4`, `h0`, `out.weight`, `out.bias`. The day layers are stacked; original_format.py maps them.

    Args:
        n_features: F.
        n_units: H.
        n_days: D.
        n_classes: C, with class 0 the CTC blank.
        rnn_dropout: between GRU layers.
        input_dropout: after the day layers.
        n_layers: GRU layers.
        patch_size, patch_stride: in bins; patch_size 0 switches patching off.
    """

    def __init__(
        self,
        n_features: int,
        n_units: int,
        n_days: int,
        n_classes: int,
        rnn_dropout: float = 0.0,
        input_dropout: float = 0.0,
        n_layers: int = 5,
        patch_size: int = 0,
        patch_stride: int = 0,
    ) -> None:
        GRU.__init__(self, n_features * max(patch_size, 1), n_units, n_layers, rnn_dropout)
        self.patch_size, self.patch_stride = patch_size, patch_stride
        self.day_layers = DayLayers(n_days, n_features, input_dropout)
        self.out = nn.Linear(n_units, n_classes)
        nn.init.xavier_uniform_(self.out.weight)

    def denoise(self, x: torch.Tensor, day_idx: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The patched signal (B, P, W), and no noise: this decoder estimates none."""
        return make_patches(self.day_layers(x, day_idx), self.patch_size, self.patch_stride).transpose(0, 1), None

    def forward(
        self,
        x: torch.Tensor,
        day_idx: torch.Tensor,
        states: torch.Tensor | None = None,
        return_state: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Phoneme logits.

        A long trial may come in pieces, as to TripleGRUDecoder.

        Args:
            x: (B, T, F), T >= patch_size.
            day_idx: (B,) integers, the trials' days.
            states: (L, B, H), what a call with return_state returned last.
            return_state: return the last states too.
        Returns:
            logits (B, P, C), or (logits, states).
        Raises:
            ValueError: for fewer bins than one patch.
        """
        _check_bins(x, self.patch_size)
        signal = make_patches(self.day_layers(x, day_idx), self.patch_size, self.patch_stride)
        hidden, states = GRU.forward(self, signal, states)
        logits = self.out(hidden).transpose(0, 1)
        return (logits, states) if return_state else logits


class TripleGRUDecoder(Decoder):
    """NoiseModel, CleanSpeechModel and NoisySpeechModel behind day layers and patches.

    Args:
        n_features: F.
        n_units: H of both speech models.
        n_days: D.
        n_classes: C, with class 0 the CTC blank.
        noise_units: H of the NoiseModel; patch_size * F, or fewer with a projection.
        patch_size, patch_stride: in bins; patch_size 0 switches patching off.
        rnn_dropout: between GRU layers.
        input_dropout: after the day layers.
        shared_day_layers: one set of day layers for both branches, or one for each of them. With one for each,
            noise = NoiseModel(patches(noise_day_layers(features))) is subtracted from
            patches(day_layers(features)).
        n_layers, noise_n_layers, noisy_n_layers: GRU layers of the clean, noise and noisy models.
    """

    def __init__(
        self,
        n_features: int,
        n_units: int,
        n_days: int,
        n_classes: int,
        noise_units: int,
        patch_size: int = 14,
        patch_stride: int = 4,
        rnn_dropout: float = 0.0,
        input_dropout: float = 0.0,
        shared_day_layers: bool = True,
        n_layers: int = 3,
        noise_n_layers: int = 2,
        noisy_n_layers: int = 2,
    ) -> None:
        super().__init__()
        self.patch_size, self.patch_stride = patch_size, patch_stride
        width = n_features * max(patch_size, 1)
        self.day_layers = DayLayers(n_days, n_features, input_dropout)
        self.noise_day_layers = None if shared_day_layers else DayLayers(n_days, n_features, input_dropout)
        self.noise_model = NoiseModel(width, noise_units, noise_n_layers, rnn_dropout)
        self.clean_speech_model = CleanSpeechModel(width, n_units, n_layers, n_classes, rnn_dropout)
        self.noisy_speech_model = NoisySpeechModel(width, n_units, noisy_n_layers, n_classes, rnn_dropout)
        self.gradient_reversal = GradientReversal()

    def denoise(self, x: torch.Tensor, day_idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The patched signal and the noise estimate in it, each (B, P, W); the denoised signal is their difference.

        Args:
            x: (B, T, F).
            day_idx: (B,) integers.
        """
        signal, noise, _ = self._estimate_noise(x, day_idx, None)
        return signal.transpose(0, 1), _formed(noise).transpose(0, 1)

    def _estimate_noise(
        self, x: torch.Tensor, day_idx: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | Projection, torch.Tensor]:
        """Signal (P, B, W), noise of that shape or its factors, last states of the NoiseModel."""
        signal = make_patches(self.day_layers(x, day_idx), self.patch_size, self.patch_stride)
        noise_input = signal
        if self.noise_day_layers is not None:
            noise_input = make_patches(self.noise_day_layers(x, day_idx), self.patch_size, self.patch_stride)
        return signal, *self.noise_model(noise_input, state)

    def forward(
        self,
        x: torch.Tensor,
        day_idx: torch.Tensor,
        mode: str = "inference",
        grl_lambda: torch.Tensor | float = 0.5,
        states: States | None = None,
        return_state: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | States, ...]:
        """Phoneme logits.

        A long trial may come in pieces: pieces that overlap by patch_size - patch_stride bins, each with the
        states that the one before returned, give the logits of the whole.

        Args:
            x: (B, T, F), T >= patch_size.
            day_idx: (B,) integers, the trials' days.
            mode: 'inference' and 'train_clean' run the NoiseModel and the CleanSpeechModel; 'full' and 'train' the
                NoisySpeechModel as well.
            grl_lambda: strength of the gradient reversal, a number or a tensor of one element; in modes 'full'
                and 'train'.
            states: what a call with return_state returned last, from the same mode.
            return_state: return the last states too, at the end of the tuple.
        Returns:
            mode 'inference': clean_logits (B, P, C), or (clean_logits, states).
            mode 'full': (clean_logits, noisy_logits, noise_output), with noise_output (B, P, W).
            mode 'train': (clean_logits, noisy_logits, noise_power), where noise_power (B, P) is the mean over W of
                the squared noise: what a loss needs, without the noise itself, which need not be formed then.
            mode 'train_clean': (clean_logits, noise_power).
        Raises:
            ValueError: for another mode, or fewer bins than one patch.
        """
        if mode not in ("inference", "full", "train", "train_clean"):
            raise ValueError(f"mode is 'inference', 'full', 'train' or 'train_clean', not {mode!r}")
        _check_bins(x, self.patch_size)
        noise_state, clean_state, noisy_state = (*(states or ()), None, None, None)[:3]
        signal, noise, noise_state = self._estimate_noise(x, day_idx, noise_state)
        if isinstance(noise, Projection):
            clean_logits, clean_state = self.clean_speech_model(signal, clean_state, noise.negative())
        else:
            clean_logits, clean_state = self.clean_speech_model(signal - noise.to(signal.dtype), clean_state)
        outputs, states = [clean_logits], [noise_state, clean_state]
        if mode in ("full", "train"):
            if isinstance(noise, Projection):
                reversed_noise = noise.map(lambda factor: self.gradient_reversal(factor, grl_lambda))
                noisy_logits, noisy_state = self.noisy_speech_model(None, noisy_state, reversed_noise)
            else:
                noisy_logits, noisy_state = self.noisy_speech_model(
                    self.gradient_reversal(noise, grl_lambda), noisy_state
                )
            outputs.append(noisy_logits)
            states.append(noisy_state)
        if mode == "full":
            outputs.append(_formed(noise))
        elif mode != "inference":
            outputs.append(_mean_square(noise))
        outputs = [output.transpose(0, 1) for output in outputs]
        if return_state:
            return (*outputs, tuple(states))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _check_bins(x: torch.Tensor, patch_size: int) -> None:
    if x.shape[1] < max(patch_size, 1):
        raise ValueError(f"{x.shape[1]} time bins are fewer than one patch of {patch_size}")


def _formed(noise: torch.Tensor | Projection) -> torch.Tensor:
    return noise.signal() if isinstance(noise, Projection) else noise


def _mean_square(noise: torch.Tensor | Projection) -> torch.Tensor:
    """(P, B), in float32 at least."""
    if isinstance(noise, Projection):
        return noise.mean_square()
    return noise.to(torch.promote_types(noise.dtype, torch.float32)).square().mean(-1)


def build_model(config: Any) -> Decoder:
    """The model that a configuration (see config.py) describes, on the default device, in float32.

    What the configuration holds fixed (`model.rnn_trainable`, `model.output_trainable`,
    `model.input_network.input_trainable`) takes no gradient, nor does the NoisySpeechModel where `adversarial.enabled`
    is false.
    """
    model, dataset = config.model, config.dataset
    common = {
        "n_features": len(dataset.feature_subset) if dataset.feature_subset else model.n_input_features,
        "n_units": model.n_units,
        "n_days": len(dataset.sessions),
        "n_classes": dataset.n_classes,
        "n_layers": model.n_layers,
        "patch_size": model.patch_size,
        "patch_stride": model.patch_stride,
        "rnn_dropout": model.rnn_dropout,
        "input_dropout": model.input_network.input_layer_dropout,
    }
    if model.architecture == "gru":
        decoder = GRUDecoder(**common)
    else:
        decoder = TripleGRUDecoder(
            **common,
            noise_units=model.noise_units,
            shared_day_layers=model.day_layers == "shared",
            noise_n_layers=model.noise_n_layers,
            noisy_n_layers=model.noisy_n_layers,
        )
        decoder.noisy_speech_model.requires_grad_(config.adversarial.enabled)
    decoder.sessions = tuple(dataset.sessions)
    decoder.feature_subset = tuple(dataset.feature_subset) if dataset.feature_subset else None
    for name, parameter in decoder.named_parameters():
        if "day_layers." in name:
            trainable = model.input_network.input_trainable
        else:
            trainable = model.rnn_trainable if RECURRENT.search(name) else model.output_trainable
        if not trainable:
            parameter.requires_grad_(False)
    return decoder
