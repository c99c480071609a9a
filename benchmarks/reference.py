"""The job as the field does it today, in plain PyTorch: what this project is measured against.

Files are opened for every batch and trials read one by one; random trials are padded to the longest of their batch; day
weights are stacked from a list; patches come from `unfold`, smoothing from a grouped convolution, layers from
torch.nn.GRU, the loss from F.ctc_loss; evaluation takes one trial at a time and collapses it in Python. Loader, step
and evaluation are apart, so that each can be measured alone. The single GRU is that of Card et al.; the triple decoder
is what its description becomes in the same style, with the noise estimate formed and every layer as torch has it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.rnn import GRU  # importing torch_xla replaces torch.nn.GRU

from config import Config
from dataset_index import Trial


class DaysAndPatches(nn.Module):
    """Day layers in lists, patches by unfold: what both decoders begin with."""

    def __init__(self, config: Config):
        super().__init__()
        model, n_features = config.model, config.model.n_input_features
        self.patch_size, self.patch_stride = model.patch_size, model.patch_stride
        days = range(len(config.dataset.sessions))
        self.day_weights = nn.ParameterList([torch.eye(n_features) for _ in days])
        self.day_biases = nn.ParameterList([torch.zeros(1, n_features) for _ in days])
        self.day_dropout = nn.Dropout(model.input_network.input_layer_dropout)

    def patched(self, x: torch.Tensor, day_idx: torch.Tensor) -> torch.Tensor:
        """(B, T, F), (B,) -> (B, P, patch_size * F)."""
        weights = torch.stack([self.day_weights[day] for day in day_idx])
        biases = torch.stack([self.day_biases[day] for day in day_idx])
        x = self.day_dropout(F.softsign(torch.einsum("btd,bdk->btk", x, weights) + biases))
        if self.patch_size:
            x = x.unsqueeze(1).permute(0, 3, 1, 2).unfold(3, self.patch_size, self.patch_stride)
            x = x.squeeze(2).permute(0, 2, 3, 1).reshape(x.shape[0], x.shape[3], -1)
        return x


def add_gru(module: nn.Module, width: int, n_units: int, n_layers: int, dropout: float) -> None:
    """Give a module a `gru` and a learnable start state `h0`, initialised as in the paper."""
    module.gru = GRU(width, n_units, n_layers, dropout=dropout if n_layers > 1 else 0.0, batch_first=True)
    for name, parameter in module.gru.named_parameters():
        if "weight_hh" in name:
            nn.init.orthogonal_(parameter)
        elif "weight_ih" in name:
            nn.init.xavier_uniform_(parameter)
    module.h0 = nn.Parameter(nn.init.xavier_uniform_(torch.zeros(1, 1, n_units)))


def run_gru(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """(B, P, W) -> (B, P, H), from the learnable start state."""
    start = module.h0.expand(module.gru.num_layers, x.shape[0], -1).contiguous()
    return module.gru(x, start)[0]


def classifier(n_units: int, n_classes: int) -> nn.Linear:
    out = nn.Linear(n_units, n_classes)
    nn.init.xavier_uniform_(out.weight)
    return out


class ReferenceDecoder(DaysAndPatches):
    """The single GRU."""

    def __init__(self, config: Config):
        super().__init__(config)
        model = config.model
        width = model.n_input_features * max(model.patch_size, 1)
        add_gru(self, width, model.n_units, model.n_layers, model.rnn_dropout)
        self.out = classifier(model.n_units, config.dataset.n_classes)

    def forward(self, x: torch.Tensor, day_idx: torch.Tensor) -> torch.Tensor:
        """(B, T, F), (B,) -> (B, P, C)."""
        return self.out(run_gru(self, self.patched(x, day_idx)))


class Recurrent(nn.Module):
    """A GRU and a linear layer on it."""

    def __init__(self, width: int, n_units: int, n_layers: int, dropout: float, n_outputs: int):
        super().__init__()
        self.recurrent = nn.Module()
        add_gru(self.recurrent, width, n_units, n_layers, dropout)
        self.out = classifier(n_units, n_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, P, W) -> (B, P, outputs)."""
        return self.out(run_gru(self.recurrent, x))


class ReverseGradient(torch.autograd.Function):
    """Identity; the gradient times -strength backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, strength: float) -> torch.Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.strength * grad, None


class ReferenceTriple(DaysAndPatches):
    """Noise, clean speech and noisy speech model, for shared day layers and a NoiseModel with a projection."""

    def __init__(self, config: Config):
        super().__init__(config)
        model, n_classes = config.model, config.dataset.n_classes
        width = model.n_input_features * max(model.patch_size, 1)
        dropout, self.strength = model.rnn_dropout, config.adversarial.grl_lambda
        self.noise_model = Recurrent(width, model.noise_units, model.noise_n_layers, dropout, width)
        self.clean_speech_model = Recurrent(width, model.n_units, model.n_layers, dropout, n_classes)
        self.noisy_speech_model = Recurrent(width, model.n_units, model.noisy_n_layers, dropout, n_classes)

    def forward(self, x: torch.Tensor, day_idx: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """(B, T, F), (B,) -> clean logits (B, P, C); in training noisy logits and noise (B, P, W) too."""
        signal = self.patched(x, day_idx)
        noise = self.noise_model(signal)
        clean = self.clean_speech_model(signal - noise)
        if not self.training:
            return clean
        return clean, self.noisy_speech_model(ReverseGradient.apply(noise, self.strength)), noise


def make_model(config: Config) -> ReferenceDecoder | ReferenceTriple:
    return ReferenceDecoder(config) if config.model.architecture == "gru" else ReferenceTriple(config)


def our_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters under this project's names, for load_state_dict of the model of the same configuration."""
    found = {name.replace("noise_model.out", "noise_model.projection"): p for name, p in model.state_dict().items()}
    for old, new in (("day_weights", "day_layers.weights"), ("day_biases", "day_layers.biases")):
        found[new] = torch.stack([found.pop(name) for name in list(found) if name.startswith(f"{old}.")])
    return found


# ---- loader


def read_trials(trials: Sequence[Trial]) -> dict[str, torch.Tensor]:
    """Features (B, T, F), n_time_steps, day_indices, labels, label_lengths; each file opened for each trial."""
    features, labels = [], []
    for trial in trials:
        with h5py.File(trial.path) as file:
            group = file[trial.key]
            features.append(torch.from_numpy(group["input_features"][()]))
            labels.append(torch.from_numpy(group["seq_class_ids"][()]))
    return {
        "features": nn.utils.rnn.pad_sequence(features, batch_first=True),
        "n_time_steps": torch.tensor([len(each) for each in features]),
        "day_indices": torch.tensor([trial.day for trial in trials]),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True),
        "label_lengths": torch.tensor([trial.seq_len for trial in trials]),
    }


def train_batches(trials: Sequence[Trial], config: Config, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Random batches without end: days_per_batch days, as many random trials of each."""
    rng = np.random.default_rng(seed)
    by_day: dict[int, list[Trial]] = {}
    for trial in trials:
        by_day.setdefault(trial.day, []).append(trial)
    n_days = min(config.dataset.days_per_batch, len(by_day))
    n_each = math.ceil(config.dataset.batch_size / n_days)
    while True:
        chosen = []
        for day in rng.choice(sorted(by_day), n_days, replace=False):
            of_day = by_day[int(day)]
            chosen += [of_day[i] for i in rng.choice(len(of_day), n_each, replace=n_each > len(of_day))]
        yield read_trials(chosen[: config.dataset.batch_size])


# ---- step


def smooth(features: torch.Tensor, std: float, size: int) -> torch.Tensor:
    """(B, T, F) by a grouped convolution; a Gaussian over `size` bins, entries of 0.01 or less dropped."""
    position = torch.arange(size) - size // 2
    kernel = torch.exp(-0.5 * (position / std) ** 2)
    kernel = kernel / kernel.sum()
    kernel = kernel[kernel > 0.01]
    kernel = kernel / kernel.sum()
    n_features = features.shape[2]
    weight = kernel.to(features)[None, None].repeat(n_features, 1, 1)
    return F.conv1d(features.transpose(1, 2), weight, padding="same", groups=n_features).transpose(1, 2)


def transform(
    features: torch.Tensor, n_time_steps: torch.Tensor, config: Config, training: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Augmentation, one random cut for the whole batch, smoothing; of the padding too."""
    t, (n_trials, _, n_features) = config.dataset.data_transforms, features.shape
    if training:
        if t.static_gain_std > 0:
            gains = torch.eye(n_features, device=features.device).repeat(n_trials, 1, 1)
            features = features @ (gains + t.static_gain_std * torch.randn_like(gains))
        if t.white_noise_std > 0:
            features = features + t.white_noise_std * torch.randn_like(features)
        if t.constant_offset_std > 0:
            offsets = torch.randn(n_trials, 1, n_features, device=features.device)
            features = features + t.constant_offset_std * offsets
        if t.random_cut > 0:
            cut = int(torch.randint(0, t.random_cut, ()))
            features, n_time_steps = features[:, cut:], n_time_steps - cut
    if t.smooth_data:
        features = smooth(features, t.smooth_kernel_std, t.smooth_kernel_size)
    return features, n_time_steps


def make_optimizer(
    model: nn.Module, config: Config
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW over biases, day layers and the rest; warm-up from zero and a cosine, by LambdaLR."""
    groups = {"bias": [], "day": [], "other": []}
    for name, parameter in model.named_parameters():
        is_bias = "gru.bias" in name or "out.bias" in name
        groups["bias" if is_bias else "day" if "day_" in name else "other"].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": groups["bias"], "lr": config.lr_max, "weight_decay": 0.0},
            {"params": groups["day"], "lr": config.lr_max_day, "weight_decay": config.weight_decay_day},
            {"params": groups["other"], "lr": config.lr_max, "weight_decay": config.weight_decay},
        ],
        betas=(config.beta0, config.beta1),
        eps=config.epsilon,
        fused=True,
    )

    def factor(group: str):
        least = config[f"lr_min{group}"] / config[f"lr_max{group}"]
        decay, warmup = config[f"lr_decay_steps{group}"], config[f"lr_warmup_steps{group}"]

        def of_step(step: int) -> float:
            if step < warmup:
                return step / warmup
            progress = min((step - warmup) / max(decay - warmup, 1), 1.0)
            return max(least, least + (1 - least) * 0.5 * (1 + math.cos(math.pi * progress)))

        return of_step

    rest, day = factor(""), factor("_day")
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [rest, day, rest])


def ctc(logits: torch.Tensor, batch: dict[str, torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
    """Mean over the trials of the CTC loss of a whole trial."""
    log_probs = logits.float().log_softmax(2).transpose(0, 1)
    return F.ctc_loss(log_probs, batch["labels"], lengths, batch["label_lengths"], blank=0, reduction="none").mean()


def batch_loss(model: nn.Module, batch: dict[str, torch.Tensor], config: Config, augment: bool = True) -> torch.Tensor:
    """The clean CTC loss; of a triple decoder in training that of the noisy branch and the noise's size too."""
    features, n_time_steps = transform(batch["features"], batch["n_time_steps"], config, augment)
    lengths = output_lengths(n_time_steps, config)
    with torch.autocast(features.device.type, torch.bfloat16, enabled=config.use_amp and features.is_cuda):
        outputs = model(features, batch["day_indices"])
    if isinstance(outputs, torch.Tensor):
        return ctc(outputs, batch, lengths)
    clean, noisy, noise = outputs
    loss = ctc(clean, batch, lengths) + config.adversarial.noisy_loss_weight * ctc(noisy, batch, lengths)
    valid = torch.arange(noise.shape[1], device=noise.device) < lengths[:, None]
    size = ((noise.float() ** 2).mean(-1) * valid).sum(1) / lengths
    return loss + config.adversarial.noise_l2_weight * size.mean()


def output_lengths(n_time_steps: torch.Tensor, config: Config) -> torch.Tensor:
    size, stride = config.model.patch_size, config.model.patch_stride
    return (n_time_steps - size) // stride + 1 if size else n_time_steps


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    batch: dict[str, torch.Tensor],
    config: Config,
) -> float:
    """One optimiser step; returns the loss."""
    model.train()
    optimizer.zero_grad()
    batch = {name: tensor.to(model.day_weights[0].device) for name, tensor in batch.items()}
    loss = batch_loss(model, batch, config)
    loss.backward()
    if config.grad_norm_clip_value > 0:
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip_value)
    optimizer.step()
    scheduler.step()
    return loss.item()


# ---- evaluation


@torch.no_grad()
def best_path(model: nn.Module, trial: Trial, config: Config) -> torch.Tensor:
    """The likeliest class of each valid frame of a trial, (P,)."""
    model.eval()
    batch = {name: tensor.to(model.day_weights[0].device) for name, tensor in read_trials([trial]).items()}
    features, n_time_steps = transform(batch["features"], batch["n_time_steps"], config, training=False)
    return model(features, batch["day_indices"])[0, : output_lengths(n_time_steps, config)[0]].argmax(-1)


def decode(model: nn.Module, trials: Sequence[Trial], config: Config) -> list[list[int]]:
    """Greedily decoded classes, one trial at a time."""
    decoded = []
    for trial in trials:
        path = torch.unique_consecutive(best_path(model, trial, config))
        decoded.append([int(index) for index in path if index != 0])
    return decoded
