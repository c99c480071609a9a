"""A tiny configuration and model for tests."""

from pathlib import Path
from typing import Any

from config import Config, config_from_dict


def tiny_config(**overrides: Any) -> Config:
    """A configuration of a few thousand parameters; overrides by dotted name with `__` for the dot."""
    settings = {
        "use_amp": False,
        "log_with": "none",
        "model": {
            "n_input_features": 6,
            "n_units": 5,
            "noise_units": 4,
            "day_layers": "shared",
            "patch_size": 4,
            "patch_stride": 2,
            "rnn_dropout": 0.0,
            "input_network": {"input_layer_sizes": [6], "input_layer_dropout": 0.0},
        },
        "adversarial": {"noise_l2_weight": 0.3},
        "dataset": {
            "neural_dim": 6,
            "batch_size": 3,
            "sessions": ["t15.2030.01.01", "t15.2030.01.02", "t15.2030.01.03"],
        },
    }
    pairs = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    return config_from_dict(settings, pairs)


def training_config(data_dir: Any, output_dir: Any, **overrides: Any) -> Config:
    """A configuration that trains for seconds on the `simulated` data set; overrides as in `tiny_config`."""
    sessions = sorted(path.name for path in Path(data_dir).iterdir() if path.is_dir())
    defaults = {
        "output_dir": output_dir,
        "dataset__dataset_dir": data_dir,
        "model__n_input_features": 8,
        "model__input_network__input_layer_sizes": "[8]",
        "model__patch_size": 14,
        "model__patch_stride": 4,
        "model__rnn_dropout": 0.2,
        "dataset__neural_dim": 8,
        "dataset__batch_size": 4,
        "dataset__days_per_batch": 2,
        "dataset__n_time_buckets": 2,
        "dataset__num_dataloader_workers": 0,
        "dataset__sessions": "[" + ", ".join(sessions) + "]",
        "num_training_batches": 6,
        "lr_warmup_steps": 2,
        "lr_warmup_steps_day": 2,
        "lr_decay_steps": 6,
        "lr_decay_steps_day": 6,
        "batches_per_train_log": 2,
        "batches_per_val_step": 3,
    }
    return tiny_config(**(defaults | overrides))
