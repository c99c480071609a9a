"""A tiny configuration and model for tests."""

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
