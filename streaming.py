"""Decoding while a trial comes: bins in any chunks to logits, phonemes and words, with the states carried along.

    decoder = StreamingDecoder("trained_models/causal", "t15.2025.04.13")
    for bins in source:                   # (n, F) arrays, n of 0 or more
        logits = decoder.push(bins)       # (k, C) of the patches that these bins complete
        decoder.phonemes, decoder.text    # so far
    decoder.finish()
    decoder.reset()                       # the next trial

The logits are those of the model on the whole trial, to rounding, and to the last bit the same for every chunking.

One frame of one trial is as fast as its weights come from memory, so each is read once a patch. The input weights of
the first layers are most of them; they are laid out by the place of a bin in a patch, and a bin is multiplied once
with all its places in the patches that are under way: nothing waits for a patch to be complete. A projected noise
estimate is never formed: clean weights times projection is one small matrix (see recurrent.Projection).

Axes: F features, P patches, C classes, H hidden units, G gates (3 H, those of the branches one after the other).
"""

import math
import os
from typing import Any

import torch
from torch.nn import functional as F

from config import Config, DataTransformsConfig, n_features
from ctc import BLANK, greedy_collapse
from data_augmentations import smoothing_taps
from evaluate_model import load_model
from language_model import NgramDecoder, WordStream
from nbest import Hypothesis
from recurrent import GRU
from rnn_model import DayLayers, Decoder, GRUDecoder

BIN_SECONDS = 0.02


class StreamingDecoder:
    """A trained decoder, of either architecture, that takes a trial's bins as they come. It runs on the CPU.

    Attributes:
        config: of the model.
        session: whose day layer is used.
        words: decodes sentences too, from the next reset on; None: phonemes alone.
        delay_bins: how many bins later than a patch's last one its logits come; 0 with causal smoothing.
        weight_bytes: of the weights that each patch reads.
        phonemes: classes of the trial so far, decoded greedily: repeats merged, blanks removed.
        hypotheses: sentences of the trial, best first, once it has ended; None before, or without words.
    """

    def __init__(
        self,
        model_path: str | os.PathLike,
        session: str | None = None,
        *,
        accept_delay: bool = False,
        z_score_seconds: float | None = None,
        words: NgramDecoder | None = None,
    ):
        """
        Args:
            model_path: run directory or checkpoint file.
            session: one of the model's sessions; None: the last.
            accept_delay: take a model whose smoothing sees later bins, and wait for them: half of the kernel, 4 bins
                with the usual one.
            z_score_seconds: z-score the features by their running statistics, with this time constant (see
                RunningZScore), for bins as they are recorded. The published features are z-scored already: None.
            words: the attribute.
        Raises:
            ValueError: the checkpoint cannot be read, the session is none of its, its smoothing sees later bins and
                accept_delay is False, or the time constant is too short.
        """
        model, self.config, _ = load_model(model_path)
        self.session = self.config.dataset.sessions[-1] if session is None else session
        day = _day_of(self.session, self.config, model_path)
        self._subset, width = self.config.dataset.feature_subset, n_features(self.config)
        self._smoother = _Smoother(self.config.dataset.data_transforms, width)
        self.delay_bins = self._smoother.delay
        if self.delay_bins and not accept_delay:
            raise ValueError(
                f"{model_path}: its smoothing sees {self.delay_bins} later bins, so that its logits come "
                f"{1000 * BIN_SECONDS * self.delay_bins:.0f} ms late. Train with --set "
                "dataset.data_transforms.smooth_causal=true, or accept the delay (accept_delay=True, or --accept_delay)"
            )
        self._z_score = None if z_score_seconds is None else RunningZScore(width, z_score_seconds)
        with torch.no_grad():
            self._network = _Network(model, day)
            for _ in range(max(self.config.model.patch_size, 1)):  # a first patch takes longer: it is none of a trial's
                self._network.push(torch.zeros(1, width))
        self.weight_bytes = self._network.weight_bytes
        self.words = words
        self.reset()

    def reset(self) -> None:
        """Begin a trial. The running statistics of the features go on."""
        self._smoother.reset()
        self._network.reset()
        self.phonemes: list[int] = []
        self.hypotheses: list[Hypothesis] | None = None
        self._last_class, self._ended = BLANK, False
        self._sentence: WordStream | None = None if self.words is None else self.words.stream()

    @torch.no_grad()
    def push(self, bins: Any) -> torch.Tensor:
        """Take the next bins.

        Args:
            bins: (n, F) numbers with n of 0 or more, as a tensor, an array or lists; F as in the files, before
                dataset.feature_subset.
        Returns:
            (k, C) float32 logits of the patches that are now complete; k may be 0.
        Raises:
            ValueError: another width, NaN or infinity; nothing is taken then. Or the trial has ended.
        """
        self._check_open()
        smoothed = []
        for features in self._checked(bins)[:, None]:
            if self._z_score is not None:
                features = self._z_score.push(features)
            smoothed.append(self._smoother.push(features))
        return self._decode(smoothed)

    @torch.no_grad()
    def finish(self) -> torch.Tensor:
        """End the trial; returns the logits (k, C) that waited for later bins, which count as zero, as offline."""
        self._check_open()
        logits = self._decode(self._smoother.flush())
        self._ended = True
        if self._sentence is not None:
            self.hypotheses = self._sentence.finish()
        return logits

    @property
    def text(self) -> str | None:
        """The words so far; what comes may change them. None without a decoder of words."""
        return None if self._sentence is None else self._sentence.text

    def _check_open(self) -> None:
        if self._ended:
            raise ValueError("the trial has ended: reset() begins the next")

    def _checked(self, bins: Any) -> torch.Tensor:
        """(n, F) float32, of the features that the model takes."""
        width = self.config.dataset.neural_dim
        try:
            bins = torch.as_tensor(bins, dtype=torch.float32, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"bins are no numbers (bins, {width} features): {error}") from error
        if bins.shape == (0,):  # an empty list
            bins = bins.reshape(0, width)
        if bins.ndim != 2 or bins.shape[1] != width:
            raise ValueError(
                f"bins are {tuple(bins.shape)}; they must be (bins, {width} features), one bin (1, {width})"
            )
        if self._subset is not None:
            bins = bins[:, self._subset]
        if not torch.isfinite(bins).all():
            wrong = (~torch.isfinite(bins)).nonzero()
            row, column = wrong[0].tolist()
            feature = column if self._subset is None else self._subset[column]
            raise ValueError(
                f"{len(wrong)} values are NaN or infinite; the first is {bins[row, column].item()}, feature {feature} "
                f"of bin {row} of the {len(bins)} given"
            )
        return bins

    def _decode(self, smoothed: list[torch.Tensor | None]) -> torch.Tensor:
        """Logits (k, C) of the patches that smoothed bins (1, F) complete, and what follows from them."""
        frames = [self._network.push(features) for features in smoothed if features is not None]
        frames = [logits for logits in frames if logits is not None]
        if not frames:
            return torch.empty(0, self.config.dataset.n_classes)
        logits = torch.cat(frames)
        path = [self._last_class, *logits.argmax(-1).tolist()]
        emitted = greedy_collapse(path)
        self.phonemes += emitted if self._last_class == BLANK else emitted[1:]  # the last one again
        self._last_class = path[-1]
        if self._sentence is not None:
            self._sentence.push(logits.log_softmax(-1).numpy())
        return logits


def _day_of(session: str, config: Config, model_path: str | os.PathLike) -> int:
    sessions = config.dataset.sessions
    if session not in sessions:
        raise ValueError(f"{model_path}: has no session {session!r}; it has {', '.join(sessions)}")
    return sessions.index(session)


class RunningZScore:
    """Each feature less its mean, over its standard deviation: both of the bins so far, the present one with them.

    Bin n weighs 1 / min(n, N), N being the bins of the time constant: until then all bins count alike, later ones
    fade as time goes. So the first bin is zero, and among the first n no value is above sqrt(n), whatever the unit of
    the feature. A feature that has never changed is zero.

    Args:
        n_features: F.
        seconds: time constant, of two bins at least.
    """

    def __init__(self, n_features: int, seconds: float):
        if not 2 * BIN_SECONDS <= seconds < math.inf:
            raise ValueError(f"z_score_seconds: expected {2 * BIN_SECONDS} (two bins) or more, found {seconds}")
        self._most = seconds / BIN_SECONDS
        self._n_bins = 0
        # A mean over minutes moves by less than float32 can add to it.
        self._mean = torch.zeros(1, n_features, dtype=torch.float64)
        self._variance = torch.zeros(1, n_features, dtype=torch.float64)

    def push(self, features: torch.Tensor) -> torch.Tensor:
        """features (1, F) of the next bin -> (1, F) float32."""
        self._n_bins += 1
        weight = 1 / min(self._n_bins, self._most)
        change = features - self._mean
        self._mean = self._mean + weight * change
        self._variance = (1 - weight) * (self._variance + weight * change.square())
        z_scored = (features - self._mean) / self._variance.sqrt()
        return torch.where(self._variance > 0, z_scored, 0.0).float()


class _Smoother:
    """The model's smoothing, a bin at a time; bins before a trial and behind it count as zero.

    Args:
        transforms: the configuration's dataset.data_transforms.
        width: F, of the features that the model takes.

    Attributes:
        delay: bins that it waits for.
    """

    def __init__(self, transforms: DataTransformsConfig, width: int):
        past, future = (1.0,), ()
        if transforms.smooth_data:
            past, future = smoothing_taps(
                transforms.smooth_kernel_std, transforms.smooth_kernel_size, transforms.smooth_causal
            )
        self.delay = len(future)
        self._taps = torch.tensor([*past[::-1], *future])[None]  # in order of time
        self._zeros = torch.zeros(self._taps.shape[1], width)
        self.reset()

    def reset(self) -> None:
        self._window, self._n_missing = self._zeros, self.delay

    def push(self, features: torch.Tensor) -> torch.Tensor | None:
        """features (1, F) -> (1, F) of the bin `delay` bins before; None where that is before the trial."""
        self._window = torch.cat([self._window[1:], features])
        if self._n_missing:
            self._n_missing -= 1
            return None
        return self._taps @ self._window

    def flush(self) -> list[torch.Tensor]:
        """What zeros behind the trial bring out of it."""
        smoothed = [self.push(self._zeros[:1]) for _ in range(self.delay)]
        return [features for features in smoothed if features is not None]


class _Product:
    """Row times matrix plus bias: what all the time goes to, as fast as the matrix comes from memory.

    The matrix lies with its inputs first: where it was measured, a row times it took a tenth less time than the matrix
    the other way round, and than a matrix times a vector either way.

    Args:
        weight: (G, K), as torch.nn.Linear has it.
        bias: (G,).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor):
        self.weight = weight.t().clone(memory_format=torch.contiguous_format)  # a copy, which no file backs
        self.bias = bias[None].clone()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (1, K) -> (1, G)."""
        return torch.addmm(self.bias, x, self.weight)


class _Network:
    """The layers of a decoder for one trial of one day, a bin at a time."""

    def __init__(self, model: Decoder, day: int):
        plain = isinstance(model, GRUDecoder)
        clean, out = (model, model.out) if plain else (model.clean_speech_model.recurrent, model.clean_speech_model.out)
        self._clean, self._noise = _Layers(clean, out.weight, out.bias), None
        weight, bias = clean.gru.weight_ih_l0, clean.gru.bias_ih_l0
        readers = [(weight, bias)]  # of the patches behind the day layer
        inputs = [(model.day_layers, readers)]
        if not plain:
            noise = model.noise_model.recurrent
            self._noise = _Layers(noise, *_minus_noise(weight, model.noise_model.projection))
            noise_reader = noise.gru.weight_ih_l0, noise.gru.bias_ih_l0
            if model.noise_day_layers is None:
                readers.insert(0, noise_reader)
            else:
                inputs.insert(0, (model.noise_day_layers, [noise_reader]))
        self._inputs = [
            _Input(layers, day, *map(torch.cat, zip(*readers, strict=True)), model) for layers, readers in inputs
        ]
        self._parts = [part for part in (*self._inputs, self._noise, self._clean) if part is not None]
        self.weight_bytes = sum(weight.nbytes for part in self._parts for weight in part.weights)

    def reset(self) -> None:
        for part in self._parts:
            part.reset()

    def push(self, features: torch.Tensor) -> torch.Tensor | None:
        """features (1, F) of a bin -> logits (1, C) of the patch that it completes, if it does."""
        gates = [each.push(features) for each in self._inputs]
        if gates[0] is None:
            return None
        gates = gates[0] if len(gates) == 1 else torch.cat(gates, 1)
        if self._noise is not None:
            of_noise, of_signal = gates.split((self._noise.n_gates, self._clean.n_gates), 1)
            gates = of_signal + self._noise.step(of_noise)
        return self._clean.step(gates)


def _minus_noise(weight: torch.Tensor, projection: torch.nn.Linear | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What `weight` (G, W) makes of the noise (W,) taken away, as weight (G, H) and bias (G,) for the NoiseModel's last
    state (H,)."""
    if projection is None:
        return -weight, weight.new_zeros(len(weight))
    factors = torch.cat([projection.weight, projection.bias[:, None]], 1)
    product = -(weight.double() @ factors.double())  # sums over a whole patch, where float32 would lose digits
    return product[:, :-1].float(), product[:, -1].float()


class _Input:
    """Day layer and input products of the first layers: the gates of a patch, summed up as its bins come.

    Args:
        layers: of which that of `day` is taken.
        weight: (G, patch_size * F) and bias (G,), of all the layers that read these patches.
        model: whose patches they are.
    """

    def __init__(self, layers: DayLayers, day: int, weight: torch.Tensor, bias: torch.Tensor, model: Decoder):
        size, self._stride = (model.patch_size, model.patch_stride) if model.patch_size else (1, 1)
        self._day = _Product(layers.weights[day].t(), layers.biases[day, 0])
        self._bias = bias[None].clone()
        places = weight.unflatten(1, (size, -1))  # (G, patch_size, F)
        # The bin that comes k bins after a patch's begin is at the places k, k + stride, ... of the patches under way,
        # the newest first; where patches do not touch, it may be at none.
        self._weights = [
            places[:, k :: self._stride].permute(2, 1, 0).flatten(1).contiguous() for k in range(self._stride)
        ]
        self._last_row, self._last_phase = divmod(size - 1, self._stride)
        self.weights = [self._day.weight, *self._weights]
        self.reset()

    def reset(self) -> None:
        self._n_bins = 0
        self._gates = self._bias.repeat(self._last_row + 1, 1)  # of the patches under way, the newest first

    def push(self, features: torch.Tensor) -> torch.Tensor | None:
        """features (1, F) -> gates (1, G) of the patch that is complete with them, if one is."""
        begun, phase = divmod(self._n_bins, self._stride)
        self._n_bins += 1
        if phase == 0 and begun > 0:
            self._gates = torch.cat([self._bias, self._gates[:-1]])
        x, weight = F.softsign(self._day(features)), self._weights[phase]
        self._gates.view(1, -1)[:, : weight.shape[1]].addmm_(x, weight)
        if phase != self._last_phase or begun < self._last_row:
            return None
        return self._gates[self._last_row :]


class _Layers:
    """The recurrence of a GRU and a linear layer that reads it, a frame at a time.

    A new state is multiplied once, with the weights of the layer above and with its own recurrent ones for the next
    frame: few large products come from memory faster than many small ones.

    Args:
        layers: the GRU, whose first input weights are _Input's.
        weight: (R, H) and bias (R,), of what reads the last layer.
    """

    def __init__(self, layers: GRU, weight: torch.Tensor, bias: torch.Tensor):
        gru, n_layers = layers.gru, layers.num_layers
        self.n_gates, self._width = 3 * layers.hidden_size, 2 * layers.hidden_size
        above = [(getattr(gru, f"weight_ih_l{i}"), getattr(gru, f"bias_ih_l{i}")) for i in range(1, n_layers)]
        self._products = []
        for i, (upper, upper_bias) in enumerate([*above, (weight, bias)]):
            own, own_bias = getattr(gru, f"weight_hh_l{i}"), getattr(gru, f"bias_hh_l{i}")
            self._products.append(_Product(torch.cat([own, upper]), torch.cat([own_bias, upper_bias])))
        self.weights = [product.weight for product in self._products]
        self._start = layers.h0[0].clone()
        self._start_gates = [product(self._start)[:, : self.n_gates] for product in self._products]
        self.reset()

    def reset(self) -> None:
        self._states = [self._start] * len(self._products)
        self._state_gates = list(self._start_gates)

    def step(self, gates: torch.Tensor) -> torch.Tensor:
        """gates (1, 3 H) of the input, with its bias -> (1, R), what is read of the last layer's new state."""
        for i, product in enumerate(self._products):
            of_state = self._state_gates[i]
            reset, update = torch.sigmoid(gates[:, : self._width] + of_state[:, : self._width]).chunk(2, 1)
            candidate = torch.tanh(torch.addcmul(gates[:, self._width :], reset, of_state[:, self._width :]))
            self._states[i] = torch.lerp(candidate, self._states[i], update)
            products = product(self._states[i])
            self._state_gates[i], gates = products[:, : self.n_gates], products[:, self.n_gates :]
        return gates
