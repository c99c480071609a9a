"""The original single-GRU decoder as its formula, in plain torch, and a run directory as its trainer leaves one."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

SESSIONS = ["t15.2023.08.11", "t15.2023.08.13", "t15.2023.08.18"]


class OriginalDecoder(nn.Module):
    """Parameters as the original names and orders them; patches and recurrence spelled out."""

    def __init__(self, neural_dim, n_units, n_days, n_classes, n_layers, patch_size, patch_stride):
        super().__init__()
        self.n_units, self.n_layers, self.patch_size, self.patch_stride = n_units, n_layers, patch_size, patch_stride
        self.day_weights = nn.ParameterList([torch.eye(neural_dim) for _ in range(n_days)])
        self.day_biases = nn.ParameterList([torch.zeros(1, neural_dim) for _ in range(n_days)])
        self.gru = nn.GRU(neural_dim * max(patch_size, 1), n_units, n_layers, batch_first=True)
        self.out = nn.Linear(n_units, n_classes)
        self.h0 = nn.Parameter(torch.randn(1, 1, n_units))
        for day in range(n_days):
            nn.init.normal_(self.day_weights[day], std=0.5)
            nn.init.normal_(self.day_biases[day])

    def forward(self, x: torch.Tensor, day_idx: torch.Tensor) -> torch.Tensor:
        """(B, T, F), (B,) -> (B, P, C), one trial and one frame after the other."""
        logits = []
        for trial, day in zip(x, day_idx.tolist(), strict=True):
            trial = trial @ self.day_weights[day] + self.day_biases[day]
            trial = trial / (1 + trial.abs())
            size, stride = self.patch_size, self.patch_stride
            if size:
                starts = range(0, len(trial) - size + 1, stride)
                trial = torch.stack([trial[start : start + size].flatten() for start in starts])
            for layer in range(self.n_layers):
                trial = self._layer(trial, layer)
            logits.append(self.out(trial))
        return torch.stack(logits)

    def _layer(self, inputs: torch.Tensor, layer: int) -> torch.Tensor:
        w_in, w_h, b_in, b_h = (
            getattr(self.gru, f"{name}_l{layer}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        state, outputs = self.h0[0, 0], []
        for x in inputs:
            from_x, from_h = (w_in @ x + b_in).chunk(3), (w_h @ state + b_h).chunk(3)
            reset, update = torch.sigmoid(from_x[0] + from_h[0]), torch.sigmoid(from_x[1] + from_h[1])
            candidate = torch.tanh(from_x[2] + reset * from_h[2])
            state = (1 - update) * candidate + update * state
            outputs.append(state)
        return torch.stack(outputs)


def original_args(root: Path, **dataset: Any) -> dict[str, Any]:
    """Settings under the original's keys, of a model that is tiny."""
    return {
        "model": {
            "n_input_features": 6, "n_units": 8, "rnn_dropout": 0.4, "rnn_trainable": True, "n_layers": 2,
            "patch_size": 4, "patch_stride": 2,
            "input_network": {
                "n_input_layers": 1, "input_layer_sizes": [6], "input_trainable": True, "input_layer_dropout": 0.2,
            },
        },
        "gpu_number": "1", "mode": "train", "use_amp": True,
        "output_dir": str(root / "run"), "checkpoint_dir": str(root / "run" / "checkpoint"),
        "init_from_checkpoint": False, "init_checkpoint_path": "None",
        "save_best_checkpoint": True, "save_all_val_steps": False, "save_final_model": False,
        "save_val_metrics": True, "early_stopping": False, "early_stopping_val_steps": 20,
        "num_training_batches": 4, "lr_scheduler_type": "cosine",
        "lr_max": 0.005, "lr_min": 0.0001, "lr_decay_steps": 4, "lr_warmup_steps": 2,
        "lr_max_day": 0.004, "lr_min_day": 0.0001, "lr_decay_steps_day": 4, "lr_warmup_steps_day": 2,
        "beta0": 0.9, "beta1": 0.999, "epsilon": 0.1, "weight_decay": 0.001, "weight_decay_day": 0,
        "seed": 10, "grad_norm_clip_value": 10, "batches_per_train_log": 2, "batches_per_val_step": 2,
        "batches_per_save": 0, "log_individual_day_val_PER": True, "log_val_skip_logs": False,
        "save_val_logits": True, "save_val_data": False,
        "dataset": {
            "data_transforms": {
                "white_noise_std": 1.0, "constant_offset_std": 0.2, "random_walk_std": 0.0, "random_walk_axis": -1,
                "static_gain_std": 0.0, "random_cut": 3, "smooth_kernel_size": 100, "smooth_data": True,
                "smooth_kernel_std": 2,
            },
            "neural_dim": 6, "batch_size": 4, "n_classes": 41, "max_seq_elements": 500, "days_per_batch": 2,
            "seed": 1, "num_dataloader_workers": 0, "loader_shuffle": False, "must_include_days": None,
            "test_percentage": 0.1, "feature_subset": None, "dataset_dir": str(root / "data"),
            "bad_trials_dict": None, "sessions": SESSIONS, "dataset_probability_val": [1] * len(SESSIONS),
        } | dataset,
    }  # fmt: skip


def original_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW in the original's three groups."""
    named = dict(model.named_parameters())
    bias = [value for name, value in named.items() if "gru.bias" in name or "out.bias" in name]
    days = [value for name, value in named.items() if "day_" in name]
    other = [value for name, value in named.items() if not ("gru.bias" in name or "out.bias" in name or "day_" in name)]
    return torch.optim.AdamW(
        [
            {"params": bias, "weight_decay": 0, "group_type": "bias"},
            {"params": days, "lr": 0.004, "weight_decay": 0, "group_type": "day_layer"},
            {"params": other, "group_type": "other"},
        ],
        lr=0.005, betas=(0.9, 0.999), eps=0.1, weight_decay=0.001,
    )  # fmt: skip


def tiny_original(seed: int = 0, n_days: int = len(SESSIONS)) -> OriginalDecoder:
    torch.manual_seed(seed)
    return OriginalDecoder(6, 8, n_days, 41, 2, 4, 2)


def write_original_run(root: Path, prefix: str = "", **dataset: Any) -> OriginalDecoder:
    """root/run/checkpoint as the original's trainer leaves it; names begin with `prefix`. Returns the model."""
    model = tiny_original()
    optimizer = original_optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0] * 3)
    directory = root / "run" / "checkpoint"
    directory.mkdir(parents=True)
    state = {
        "model_state_dict": {prefix + name: value for name, value in model.state_dict().items()},
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict(),
        "val_PER": np.float64(0.101),
        "val_loss": np.float32(20.5),
    }
    torch.save(state, directory / "best_checkpoint")
    (directory / "args.yaml").write_text(yaml.safe_dump(original_args(root, **dataset)))
    return model
