"""The run directories of the original single-GRU decoder (Card et al., NEJM 2024), read and written.

    <run>/checkpoint/best_checkpoint   a dict: model_state_dict, optimizer_state_dict, scheduler_state_dict, val_PER
    <run>/checkpoint/args.yaml         its settings

It has two parameters a recording day, `day_weights.N` (F, F) and `day_biases.N` (1, F); GRUDecoder has all days in
`day_layers.weights` (D, F, F) and `day_layers.biases` (D, 1, F). All other names are the same, but for what training
wrapped around them (`_orig_mod.` of torch.compile, `module.` of DistributedDataParallel).
"""

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from config import Config, config_from_dict, n_features
from optimizer import learning_rates, make_optimizer
from rnn_model import build_model
from typed_settings import ConfigError, look_up, put, read_yaml_file, remove_unknown

logger = logging.getLogger("b2txt")

OWN_TRANSFORMS = ("n_time_masks", "time_mask_bins", "n_channel_masks", "channel_mask_size", "smooth_causal")
DAY_PARAMETERS = {"day_weights": "day_layers.weights", "day_biases": "day_layers.biases"}
PARAMETER = re.compile(r"(?:.*\.)?((?:day_weights|day_biases)\.\d+|gru\.(?:weight|bias)_[ih]h_l\d+|out\.\w+|h0)")
SETTINGS = "args.yaml"
WRAPPER = "_orig_mod."  # its trainer loads into a compiled model, and its evaluation takes this off
UNUSED = (  # its settings that say nothing of a trained model, and that others leave as it happens
    *("mode", "gpu_number", "init_from_checkpoint", "init_checkpoint_path"),
    *("dataset.test_percentage", "dataset.loader_shuffle", "dataset.must_include_days"),
)
STATES = ("optimizer_state_dict", "scheduler_state_dict")
GROUP_TYPES = {"bias": "bias", "day_layers": "day_layer", "other": "other"}  # its names of the optimiser's groups
OWN_SETTINGS = (  # that the original does not know
    *("use_tpu", "num_tpu_cores", "gradient_accumulation_steps", "log_with", "adversarial", "decoder"),
    *("model.architecture", "model.noise_units", "model.noise_n_layers", "model.noisy_n_layers", "model.day_layers"),
    *(
        "model.output_trainable",
        "dataset.n_time_buckets",
        *(f"dataset.data_transforms.{name}" for name in OWN_TRANSFORMS),
    ),
)


class OriginalFormatError(ValueError):
    """A checkpoint in the original layout that cannot be used, or one of ours that it cannot hold."""


def is_original(parameters: Any) -> bool:
    """Whether a model_state_dict has a parameter a day, as the original's."""
    names = parameters if isinstance(parameters, Mapping) else ()
    return any(isinstance(name, str) and re.search(r"(^|\.)day_weights\.\d+$", name) for name in names)


def stacked(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters under GRUDecoder's names, whatever prefixes they have, the days stacked.

    Raises:
        OriginalFormatError: listing names that are unknown, there twice, or missing between days.
    """
    problems, found = [], {}
    for name, value in parameters.items():
        match = PARAMETER.fullmatch(name)
        if match is None:
            problems.append(f"{name}: no parameter of the original decoder")
        elif match[1] in found:
            problems.append(f"{name}: the second of that name, with another prefix")
        else:
            found[match[1]] = value
    for old, new in DAY_PARAMETERS.items():
        days = {int(name.rpartition(".")[2]): found.pop(name) for name in list(found) if name.startswith(f"{old}.")}
        shapes = {tuple(value.shape) for value in days.values()}
        missing = [f"{old}.{day}" for day in range(max(days, default=0) + 1) if day not in days]
        if missing or len(shapes) > 1:
            problems += [f"{name}: missing" for name in missing]
            problems += [f"{old}: of several shapes, {sorted(shapes)}"] if len(shapes) > 1 else []
        else:
            found[new] = torch.stack([days[day] for day in sorted(days)])
    if problems:
        raise OriginalFormatError("\n  - ".join(["cannot be read as the original decoder:", *problems]))
    return found


def read_original(state: Mapping[str, Any], path: Path, settings: str | Path | None = None) -> dict[str, Any]:
    """A checkpoint as this project's own, from what the original wrote.

    Args:
        state: what the file at `path` holds.
        path: of the file; args.yaml lies beside it.
        settings: a YAML file in the place of args.yaml, where there is none.
    Raises:
        OriginalFormatError: there are no settings, or the parameters are not the original's.
        ConfigError: the settings cannot be used.
    """
    beside = path.with_name(SETTINGS)
    settings = beside if settings is None or beside.is_file() else Path(settings)
    if not settings.is_file():
        raise OriginalFormatError(
            f"{path}: is of the original decoder, whose sessions and preprocessing stand in {SETTINGS}: there is no "
            f"{settings}; put it there (evaluate_model.py and convert_checkpoint.py take one by --config_path)"
        )
    try:
        parameters = stacked(state["model_state_dict"])
    except OriginalFormatError as error:
        raise OriginalFormatError(f"{path}: {error}") from error
    config = _read_settings(settings)
    transforms, last = config.dataset.data_transforms, state.get("scheduler_state_dict")
    return {
        "model_state_dict": parameters,
        "step": int(last.get("last_epoch", 0)) if isinstance(last, Mapping) else 0,
        "config": config.to_dict(),
        "preprocessing": {key: transforms[key] for key in transforms if key.startswith("smooth")},
        "sessions": list(config.dataset.sessions),
        "val_PER": _number(state.get("val_PER")),
        "val_loss": _number(state.get("val_loss")),
        "original_states": {name: state[name] for name in STATES if name in state},
    }


def _number(value: Any) -> float:
    """NaN where it is no number: nothing rests on it."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return float("nan")


def _read_settings(path: Path) -> Config:
    """The original's settings; keys that this project does not know are said and passed over, as they are its own."""
    data, problems = read_yaml_file(os.fspath(path))
    if not isinstance(data, dict) or problems:
        lines = [f"{key}: {problem}" for key, problem in problems.items()] or ["no keys with values"]
        raise OriginalFormatError("\n  - ".join([f"{path}: cannot be read as settings:", *lines]))
    for key in remove_unknown(Config, data):
        logger.warning("%s: %s is unknown and not used", path, key)
    for key in UNUSED:
        section, _, leaf = key.rpartition(".")
        (look_up(data, section, {}) if section else data).pop(leaf, None)
    try:  # the original's paths start where it was run, which nobody knows: here
        return config_from_dict(data, ["model.architecture=gru", "adversarial.enabled=false"])
    except ConfigError as error:
        raise OriginalFormatError(f"{path}: {error}") from error


# ---- writing


def per_day(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """GRUDecoder's parameters under the original's names, in its order.

    Raises:
        OriginalFormatError: they are those of another decoder.
    """
    stacks = {old: parameters.get(new) for old, new in DAY_PARAMETERS.items()}
    others = {name: value for name, value in parameters.items() if name not in DAY_PARAMETERS.values()}
    unknown = [name for name in others if PARAMETER.fullmatch(name) is None or PARAMETER.fullmatch(name)[1] != name]
    if unknown or any(value is None for value in stacks.values()):
        raise OriginalFormatError(
            "only a single-GRU decoder (model.architecture: gru) can be written in the original layout; this one has "
            + ", ".join(unknown[:3] or ["no day layers"])
        )
    days = {f"{old}.{day}": one.clone() for old, value in stacks.items() for day, one in enumerate(value)}
    first = {name: others.pop(name) for name in ["h0"]}  # torch lists a module's own before its parts'
    return first | days | others


def original_checkpoint(checkpoint: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """What the original's trainer and evaluation read, from a checkpoint of a single-GRU decoder.

    Args:
        checkpoint: with the optimiser's state, or without: it is then one of a training that begins.
        config: of it.
    Raises:
        OriginalFormatError: it is another decoder's, or one of causally smoothed features.
    """
    transforms, step = config.dataset.data_transforms, checkpoint["step"]
    if transforms.smooth_data and transforms.smooth_causal:
        raise OriginalFormatError(
            "it was trained with dataset.data_transforms.smooth_causal, and the original smooths over later bins as "
            "well: there it would decode other features than it has learned"
        )
    rates = learning_rates(step, config)
    written = {
        "model_state_dict": {WRAPPER + name: value for name, value in per_day(checkpoint["model_state_dict"]).items()},
        "scheduler_state_dict": {  # of torch's LambdaLR
            "base_lrs": [config.lr_max, config.lr_max_day, config.lr_max],
            "last_epoch": step,
            "_step_count": step + 1,
            "_last_lr": rates,
            "lr_lambdas": [None] * len(rates),
        },
        "val_PER": checkpoint.get("val_PER", float("nan")),
        "val_loss": checkpoint.get("val_loss", float("nan")),
    } | checkpoint.get("original_states", {})
    if "optimizer_state_dict" not in written:
        state = checkpoint.get("optimizer_state_dict")
        if state is None:  # as at the start of a training
            with torch.device("meta"):
                state = make_optimizer(build_model(config), config, "meta").state_dict()
        written["optimizer_state_dict"] = _optimizer_per_day(state, config)
    return written


def _optimizer_per_day(saved: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The state of torch's AdamW over the original's parameters, from that of DayAdamW over GRUDecoder's.

    A day that was never in a batch has no state, as there.
    """
    state, groups, initial = {}, [], [config.lr_max, config.lr_max_day, config.lr_max]
    for group, initial_lr in zip(saved["param_groups"], initial, strict=True):
        first = sum(len(each["params"]) for each in groups)
        entries = [saved["state"].get(number, {}) for number in group["params"]]
        if group["name"] == "day_layers":
            n_days = len(config.dataset.sessions)
            entries = [_of_day(entry, day) for entry in entries for day in range(n_days)]
        state |= {number: entry for number, entry in enumerate(entries, first) if entry}
        groups.append(
            {
                **{key: value for key, value in group.items() if key not in ("name", "per_day", "params")},
                **{"lr": float(group["lr"]), "initial_lr": initial_lr, "group_type": GROUP_TYPES[group["name"]]},
                **{"fused": None, "foreach": None, "capturable": False},
                "params": list(range(first, first + len(entries))),
            }
        )
    return {"state": state, "param_groups": groups}


def _of_day(entry: Mapping[str, torch.Tensor], day: int) -> dict[str, torch.Tensor]:
    if not entry or entry["step"][day] == 0:
        return {}
    return {name: values[day].clone() for name, values in entry.items()}


def original_args(config: Config) -> dict[str, Any]:
    """The settings under the original's keys, without those that it does not know."""
    settings = config.to_dict()
    for key in OWN_SETTINGS:
        section, _, leaf = key.rpartition(".")
        (look_up(settings, section) if section else settings).pop(leaf)
    # Its model is as wide as this says, whatever the subset.
    put(settings, "model.n_input_features", n_features(config))
    put(settings, "model.input_network.input_layer_sizes", [n_features(config)])
    return settings
