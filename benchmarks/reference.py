"""The single GRU's job as the field does it today, in plain PyTorch: what this project is measured against.

Files are opened for every batch and trials read one by one; random trials are padded to the longest of their batch; day
weights are stacked from a list; patches come from `unfold`, smoothing from a grouped convolution, layers from
torch.nn.GRU, the loss from F.ctc_loss; evaluation takes one trial at a time and collapses it in Python. Loader, step
and evaluation are apart, so that each can be measured alone. The settings are those of a configuration with
`model.architecture: gru`.
"""

import math
from collections.abc import Iterator, Sequence

import h5py
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.rnn import GRU  # importing torch_xla replaces torch.nn.GRU

from config import Config
from dataset_index import Trial


class ReferenceDecoder(nn.Module):
    """Day layers in lists, patches by unfold, one GRU, a linear classifier."""

    def __init__(self, config: Config):
        super().__init__()
        model, n_features = config.model, config.model.n_input_features
        self.patch_size, self.patch_stride = model.patch_size, model.patch_stride
        days = range(len(config.dataset.sessions))
        self.day_weights = nn.ParameterList([torch.eye(n_features) for _ in days])
        self.day_biases = nn.ParameterList([torch.zeros(1, n_features) for _ in days])
        self.day_dropout = nn.Dropout(model.input_network.input_layer_dropout)
        width = n_features * max(self.patch_size, 1)
        self.gru = GRU(width, model.n_units, model.n_layers, dropout=model.rnn_dropout, batch_first=True)
        for name, parameter in self.gru.named_parameters():
            if "weight_hh" in name:
                nn.init.orthogonal_(parameter)
            elif "weight_ih" in name:
                nn.init.xavier_uniform_(parameter)
        self.out = nn.Linear(model.n_units, config.dataset.n_classes)
        nn.init.xavier_uniform_(self.out.weight)
        self.h0 = nn.Parameter(nn.init.xavier_uniform_(torch.zeros(1, 1, model.n_units)))

    def forward(self, x: torch.Tensor, day_idx: torch.Tensor) -> torch.Tensor:
        """(B, T, F), (B,) -> (B, P, C)."""
        weights = torch.stack([self.day_weights[day] for day in day_idx])
        biases = torch.stack([self.day_biases[day] for day in day_idx])
        x = self.day_dropout(F.softsign(torch.einsum("btd,bdk->btk", x, weights) + biases))
        if self.patch_size:
            x = x.unsqueeze(1).permute(0, 3, 1, 2).unfold(3, self.patch_size, self.patch_stride)
            x = x.squeeze(2).permute(0, 2, 3, 1).reshape(x.shape[0], x.shape[3], -1)
        start = self.h0.expand(self.gru.num_layers, x.shape[0], -1).contiguous()
        hidden, _ = self.gru(x, start)
        return self.out(hidden)


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
            gains = torch.eye(n_features).repeat(n_trials, 1, 1)
            features = features @ (gains + t.static_gain_std * torch.randn_like(gains))
        if t.white_noise_std > 0:
            features = features + t.white_noise_std * torch.randn_like(features)
        if t.constant_offset_std > 0:
            features = features + t.constant_offset_std * torch.randn(n_trials, 1, n_features)
        if t.random_cut > 0:
            cut = int(torch.randint(0, t.random_cut, ()))
            features, n_time_steps = features[:, cut:], n_time_steps - cut
    if t.smooth_data:
        features = smooth(features, t.smooth_kernel_std, t.smooth_kernel_size)
    return features, n_time_steps


def make_optimizer(
    model: ReferenceDecoder, config: Config
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


def batch_loss(model: ReferenceDecoder, batch: dict[str, torch.Tensor], config: Config, training: bool) -> torch.Tensor:
    """Mean over the trials of the CTC loss of a whole trial."""
    features, n_time_steps = transform(batch["features"], batch["n_time_steps"], config, training)
    logits = model(features, batch["day_indices"])
    return F.ctc_loss(
        logits.log_softmax(2).transpose(0, 1), batch["labels"], output_lengths(n_time_steps, config),
        batch["label_lengths"], blank=0, reduction="none",
    ).mean()  # fmt: skip


def output_lengths(n_time_steps: torch.Tensor, config: Config) -> torch.Tensor:
    size, stride = config.model.patch_size, config.model.patch_stride
    return (n_time_steps - size) // stride + 1 if size else n_time_steps


def train_step(
    model: ReferenceDecoder,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    batch: dict[str, torch.Tensor],
    config: Config,
) -> float:
    """One optimiser step; returns the loss."""
    model.train()
    optimizer.zero_grad()
    loss = batch_loss(model, batch, config, training=True)
    loss.backward()
    if config.grad_norm_clip_value > 0:
        nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip_value)
    optimizer.step()
    scheduler.step()
    return loss.item()


# ---- evaluation


@torch.no_grad()
def decode(model: ReferenceDecoder, trials: Sequence[Trial], config: Config) -> list[list[int]]:
    """Greedily decoded classes, one trial at a time."""
    model.eval()
    decoded = []
    for trial in trials:
        batch = read_trials([trial])
        features, n_time_steps = transform(batch["features"], batch["n_time_steps"], config, training=False)
        path = model(features, batch["day_indices"])[0, : output_lengths(n_time_steps, config)[0]].argmax(-1)
        path = torch.unique_consecutive(path)
        decoded.append([int(index) for index in path if index != 0])
    return decoded
