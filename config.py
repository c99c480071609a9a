"""The configuration of a run: rnn_args.yaml read into typed dataclasses, changed, checked and saved.

    config = load_config("rnn_args.yaml", ["dataset.batch_size=16", "lr_max=1e-3"])
    config.lr_max = 0.001              # the same value as
    config["lr_max"] = 0.001
    check_config(config)               # after a script changed values: every problem at once

A key that is unknown, or whose value is of the wrong type or out of range, is never passed over in silence:
reading lists all such problems in one ConfigError, assigning raises at once. rnn_args.yaml explains each key.
This file holds the keys and the rules between them; typed_settings.py does what any such file needs.
"""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import yaml

from typed_settings import (
    ConfigError,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Probability,
    Range,
    Section,
    build,
    describe_value,
    look_up,
    plain,
    put,
    raise_problems,
    read_overrides,
    read_yaml_file,
    root_section,
    shortened,
)

N_CLASSES = 41  # CTC blank, 39 phonemes, silence: the classes of the data's labels
ORIGINAL_LAYERS = 5  # of the single GRU, where a file does not say how many
TRACKERS = (  # the trackers that Accelerate 1.15 knows, and none
    *("tensorboard", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "trackio", "wandb"),
    "none",
)


@dataclass
class InputNetworkConfig(Section):
    n_input_layers: Count = 1
    input_layer_sizes: list[Count] = field(default_factory=lambda: [512])
    input_trainable: bool = True
    input_layer_dropout: Probability = 0.2


@dataclass
class ModelConfig(Section):
    architecture: Literal["triple_gru", "gru"] = "triple_gru"
    n_input_features: Count = 512
    n_units: Count = 768
    n_layers: Count = 3
    noise_units: Count = 7168
    noise_n_layers: Count = 2
    noisy_n_layers: Count = 2
    day_layers: Literal["per_branch", "shared"] = "per_branch"
    rnn_dropout: Probability = 0.4
    rnn_trainable: bool = True
    output_trainable: bool = True
    patch_size: CountOrZero = 14
    patch_stride: CountOrZero = 4
    input_network: InputNetworkConfig = field(default_factory=InputNetworkConfig)


@dataclass
class AdversarialConfig(Section):
    enabled: bool = True
    grl_lambda: NotNegative = 0.5
    noisy_loss_weight: NotNegative = 0.2
    noise_l2_weight: NotNegative = 0.0
    warmup_steps: CountOrZero = 0


@dataclass
class DataTransformsConfig(Section):
    white_noise_std: NotNegative = 1.0
    constant_offset_std: NotNegative = 0.2
    random_walk_std: NotNegative = 0.0
    random_walk_axis: Literal[1, -1] = 1
    static_gain_std: NotNegative = 0.0
    random_cut: CountOrZero = 3
    n_time_masks: CountOrZero = 0
    time_mask_bins: Count = 40
    n_channel_masks: CountOrZero = 0
    channel_mask_size: Count = 64
    smooth_data: bool = True
    smooth_kernel_std: Annotated[float, Range(above=0, below=39)] = 2.0  # beyond, every tap is under 0.01
    smooth_kernel_size: Count = 100
    smooth_causal: bool = False


@dataclass
class DatasetConfig(Section):
    dataset_dir: str = "data/hdf5_data_final"
    neural_dim: Count = 512
    feature_subset: list[CountOrZero] | None = None
    n_classes: Count = N_CLASSES
    max_seq_elements: Count = 500
    batch_size: Count = 64
    days_per_batch: Count = 4
    must_include_days: list[int] | None = None
    n_time_buckets: Count = 6
    seed: CountOrZero = 1
    num_dataloader_workers: CountOrZero = 0
    loader_shuffle: bool = False
    test_percentage: float | None = 0.1
    bad_trials_dict: dict[str, dict[int, list[int]]] | None = None
    data_transforms: DataTransformsConfig = field(default_factory=DataTransformsConfig)
    sessions: list[str] = field(default_factory=list)
    dataset_probability_val: list[int] | None = None


@dataclass
class DecoderConfig(Section):
    beam_size: Count = 100
    beam_threshold: Positive = 25.0
    lm_weight: NotNegative = 1.2
    word_score: float = 0.0
    silence_score: float = -2.0
    blank_penalty: float = 1.5
    acoustic_scale: Positive = 1.0
    n_best: Count = 10


@root_section
@dataclass
class Config(Section):
    """The whole configuration. Its defaults are the original's; rnn_args.yaml explains every key."""

    mode: str = "train"
    seed: Annotated[int, Range(least=-1)] = 10
    output_dir: str = "trained_models/baseline_rnn"
    checkpoint_dir: str | None = None  # never None once set: it stands for output_dir/checkpoint
    init_from_checkpoint: bool = False
    init_checkpoint_path: str | None = None

    use_tpu: bool = False
    num_tpu_cores: Count = 8
    gpu_number: int | str = "1"
    use_amp: bool = True
    gradient_accumulation_steps: Count = 1

    model: ModelConfig = field(default_factory=ModelConfig)
    adversarial: AdversarialConfig = field(default_factory=AdversarialConfig)

    num_training_batches: Count = 120000
    lr_scheduler_type: Literal["cosine", "linear"] = "cosine"
    lr_max: Positive = 0.005
    lr_min: NotNegative = 0.0001
    lr_decay_steps: Count = 120000
    lr_warmup_steps: CountOrZero = 1000
    lr_max_day: Positive = 0.005
    lr_min_day: NotNegative = 0.0001
    lr_decay_steps_day: Count = 120000
    lr_warmup_steps_day: CountOrZero = 1000
    beta0: Probability = 0.9
    beta1: Probability = 0.999
    epsilon: Positive = 0.1
    weight_decay: NotNegative = 0.001
    weight_decay_day: NotNegative = 0.0
    grad_norm_clip_value: NotNegative = 10.0

    batches_per_train_log: Count = 200
    batches_per_val_step: Count = 2000
    batches_per_save: CountOrZero = 0
    early_stopping: bool = False
    early_stopping_val_steps: Count = 20
    save_best_checkpoint: bool = True
    save_all_val_steps: bool = False
    save_final_model: bool = False
    save_val_metrics: bool = True
    save_val_logits: bool = True
    save_val_data: bool = False
    log_individual_day_val_PER: bool = True
    log_val_skip_logs: bool = False
    log_with: Literal[TRACKERS] = "tensorboard"

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)

    def __setattr__(self, key: str, value: Any) -> None:
        before = self.__dict__.get("output_dir")
        super().__setattr__(key, value)
        checkpoint_dir = self.__dict__.get("checkpoint_dir")
        if key == "output_dir" and checkpoint_dir is not None:  # a checkpoint folder inside moves along
            moved = _moved(checkpoint_dir, before, self.output_dir)
            object.__setattr__(self, "checkpoint_dir", moved or checkpoint_dir)
        elif key == "checkpoint_dir" and checkpoint_dir is None:
            object.__setattr__(self, "checkpoint_dir", os.path.join(self.output_dir, "checkpoint"))


PATHS = ("output_dir", "checkpoint_dir", "init_checkpoint_path", "dataset.dataset_dir")


def load_config(path: str | os.PathLike, overrides: Sequence[str] = ()) -> Config:
    """Read a configuration file, apply overrides, check everything.

    Args:
        path: a YAML file. Relative paths in it are relative to its folder.
        overrides: `key=value` or `section.key=value`, values as in YAML; later ones win. Relative paths in
            them are relative to the current directory. Overriding output_dir moves checkpoint_dir along.
    Returns:
        the configuration, with absolute paths.
    Raises:
        ConfigError: listing every problem.
    """
    path = os.fspath(path)
    data, problems = read_yaml_file(path)
    return _resolve({} if data is None else data, overrides, os.path.dirname(os.path.abspath(path)), problems, path)


def config_from_dict(
    data: Mapping[str, Any] | Config, overrides: Sequence[str] = (), base_dir: str | os.PathLike | None = None
) -> Config:
    """As `load_config`, from a mapping, whose relative paths start at base_dir (default: the current one)."""
    return _resolve(data, overrides, os.path.abspath(base_dir or "."), {})


def load_decoder_settings(path: str | os.PathLike | None, default: DecoderConfig) -> DecoderConfig:
    """The decoder's settings: the default's, changed by those of a YAML file with a `decoder:` section.

    Args:
        path: such a file, as evaluate_model.py --tune_decoder writes; None: no change.
    Raises:
        ConfigError: listing every problem of the file.
    """
    if path is None:
        return default.copy()
    path = os.fspath(path)
    data, problems = read_yaml_file(path)
    data = plain(data)
    if not isinstance(data, dict) or not isinstance(data.get("decoder"), dict):
        raise ConfigError(f"{path}: expected a section 'decoder:' with settings, as --tune_decoder writes")
    settings = build(DecoderConfig, default.to_dict() | data["decoder"], problems)
    raise_problems(problems, path)
    return settings


def check_config(config: Config, source: str | None = None) -> None:
    """Raise a ConfigError that lists every wrong value; looks at values only, never at files."""
    problems: dict[str, str] = {}
    _check(build(Config, config, problems), problems)
    raise_problems(problems, source)


def save_config(config: Config, path: str | os.PathLike) -> None:
    """Write the configuration as a YAML file that `load_config` reads back to an equal one."""
    path = os.fspath(path)
    temporary = f"{path}.{os.getpid()}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        yaml.safe_dump(config.to_dict(), file, sort_keys=False, allow_unicode=True, width=110)
    os.replace(temporary, path)


def n_features(config: Config) -> int:
    """Features that the model sees in a time bin: those of the subset where one is given."""
    subset = config.dataset.feature_subset
    return config.model.n_input_features if subset is None else len(subset)


def _resolve(
    data: Any, overrides: Sequence[str], base_dir: str, problems: dict[str, str], source: str | None = None
) -> Config:
    """Apply the overrides, make paths absolute, build and check."""
    data = plain(data)
    if not isinstance(data, dict):
        raise ConfigError(
            f"{source or 'configuration'}: expected keys with values (seed: 10), found {describe_value(data)}"
        )
    defaults = Config().to_dict() | {"checkpoint_dir": None}
    for key in PATHS:
        put(data, key, _absolute(look_up(data, key, look_up(defaults, key)), base_dir))
    given = read_overrides(Config, overrides, problems)
    if "output_dir" in given and "checkpoint_dir" not in given:  # two runs must not meet in one folder
        folders = [look_up(data, "checkpoint_dir"), look_up(data, "output_dir"), given["output_dir"]]
        inside = all(isinstance(folder, str) for folder in folders) and _moved(*folders)
        given["checkpoint_dir"] = inside or None
    for key, value in given.items():
        put(data, key, _absolute(value, os.getcwd()) if key in PATHS else value)
    if look_up(data, "model.architecture") is None:  # the original's files know no other
        put(data, "model.architecture", "gru" if data.get("adversarial") is None else "triple_gru")
    if look_up(data, "model.architecture") == "gru":
        for key, value in (("model.n_layers", ORIGINAL_LAYERS), ("adversarial.enabled", False)):
            if look_up(data, key) is None:
                put(data, key, value)
    config = build(Config, data, problems)
    _check(config, problems)
    raise_problems(problems, source)
    return config


def _absolute(path: Any, base_dir: str) -> Any:
    """The path below base_dir; anything that is no path (null, a wrong type) as it is."""
    if not isinstance(path, str | os.PathLike) or path in ("", "None"):
        return path
    return os.path.abspath(os.path.join(base_dir, os.path.expanduser(path)))


def _moved(folder: str, old: str, new: str) -> str | None:
    """Where a folder inside `old` comes to lie when `old` becomes `new`; None where it is not inside."""
    relative = os.path.relpath(folder, old)
    return None if relative.split(os.sep)[0] == os.pardir else os.path.normpath(os.path.join(new, relative))


# ---- rules between keys, and values refused with a reason


def _check(config: Config, problems: dict[str, str]) -> None:
    """Add the broken rules to problems (key → message), but none about a key that has a problem already."""
    wrong = set(problems)

    def refuse(message: str, *keys: str) -> None:
        """The keys that the rule is about, the one to change first."""
        if not wrong.intersection(keys):
            problems.setdefault(keys[0], message)

    _check_run(config, refuse)
    _check_model(config, refuse)
    _check_dataset(config, refuse)


def _check_run(config: Config, refuse: Callable[..., None]) -> None:
    if config.mode != "train":
        refuse(f"only 'train' is known, found {config.mode!r}; evaluate_model.py evaluates a model", "mode")
    if config.init_from_checkpoint and config.init_checkpoint_path is None:
        refuse("expected the run or checkpoint to start from (init_from_checkpoint is true)", "init_checkpoint_path")
    if not config.output_dir:
        refuse("expected a folder, found nothing", "output_dir")
    gpu_number = str(config.gpu_number)
    if not (gpu_number.isascii() and gpu_number.isdigit()):
        refuse(f"expected the number of one GPU, from 0, found {config.gpu_number!r}", "gpu_number")
    for group in ("", "_day"):
        pairs = (f"lr_min{group}", f"lr_max{group}"), (f"lr_warmup_steps{group}", f"lr_decay_steps{group}")
        for less, more in pairs:
            if config[less] > config[more]:
                refuse(f"is above {more} ({config[less]} > {config[more]})", less, more)


def _check_model(config: Config, refuse: Callable[..., None]) -> None:
    model, network, subset = config.model, config.model.input_network, config.dataset.feature_subset
    if model.architecture == "gru" and config.adversarial.enabled:
        message = "must be false with model.architecture: gru, which estimates no noise; triple_gru does"
        refuse(message, "adversarial.enabled", "model.architecture")
    if model.patch_size > 0 and model.patch_stride < 1:
        message = f"expected at least 1, found {model.patch_stride}; model.patch_size: 0 switches patching off"
        refuse(message, "model.patch_stride", "model.patch_size")
    if model.n_input_features != config.dataset.neural_dim:
        message = (
            f"must equal dataset.neural_dim ({model.n_input_features} and {config.dataset.neural_dim}); "
            "to use fewer features, set dataset.feature_subset"
        )
        refuse(message, "model.n_input_features", "dataset.neural_dim")
    if network.n_input_layers != 1:
        message = f"must be 1, found {network.n_input_layers}: there is one day layer a session"
        refuse(message, "model.input_network.n_input_layers")
    widths = [[config.dataset.neural_dim]] + ([[len(subset)]] if subset else [])
    if network.input_layer_sizes not in widths:
        message = (
            f"must be {' or '.join(map(str, widths))}, found {network.input_layer_sizes}: "
            "a day layer is as wide as its input"
        )
        key = "model.input_network.input_layer_sizes"
        refuse(message, key, "dataset.neural_dim", "dataset.feature_subset")


def _check_dataset(config: Config, refuse: Callable[..., None]) -> None:
    dataset, subset, transforms = config.dataset, config.dataset.feature_subset, config.dataset.data_transforms
    if not dataset.dataset_dir:
        refuse("expected a folder, found nothing", "dataset.dataset_dir")
    if dataset.n_classes != N_CLASSES:
        message = f"must be {N_CLASSES} (blank, 39 phonemes, silence: the files'), found {dataset.n_classes}"
        refuse(message, "dataset.n_classes")
    if dataset.loader_shuffle:
        message = "must be false: the plan of batches is random already, a function of dataset.seed and the step"
        refuse(message, "dataset.loader_shuffle")
    if dataset.test_percentage not in (None, 0.1):
        message = f"must be 0.1 or null, since the files fix the split; found {dataset.test_percentage}"
        refuse(message, "dataset.test_percentage")
    if subset is not None:
        keys = ("dataset.feature_subset", "dataset.neural_dim")
        beyond = sorted(index for index in set(subset) if index >= dataset.neural_dim)
        if not subset:
            refuse("is empty; null takes all features", *keys)
        elif beyond:
            refuse(f"expected indices below neural_dim ({dataset.neural_dim}), found {shortened(beyond)}", *keys)
        elif _repeated(subset):
            refuse(f"each feature once; found more than once: {shortened(_repeated(subset))}", *keys)
    if transforms.n_channel_masks > 0 and transforms.channel_mask_size > n_features(config):
        message = f"is above the number of features ({transforms.channel_mask_size} > {n_features(config)})"
        refuse(message, "dataset.data_transforms.channel_mask_size", "dataset.feature_subset")
    _check_sessions(dataset, refuse)


def _check_sessions(dataset: DatasetConfig, refuse: Callable[..., None]) -> None:
    sessions, n_sessions = dataset.sessions, len(dataset.sessions)
    if not sessions or "" in sessions:
        refuse("expected the names of one or more folders in dataset.dataset_dir", "dataset.sessions")
        return
    if _repeated(sessions):
        refuse(f"each session once; found more than once: {shortened(_repeated(sessions))}", "dataset.sessions")
    in_val = dataset.dataset_probability_val
    if in_val is not None:
        keys = ("dataset.dataset_probability_val", "dataset.sessions")
        if len(in_val) != n_sessions:
            refuse(f"expected one entry a session ({n_sessions}), found {len(in_val)}; null: all 1", *keys)
        elif set(in_val) - {0, 1}:
            refuse(f"expected 1 (validate on the session) or 0 (do not) each, found {shortened(in_val)}", *keys)
    days = dataset.must_include_days
    if days is not None:
        keys = ("dataset.must_include_days", "dataset.sessions", "dataset.days_per_batch")
        if not all(-n_sessions <= day < n_sessions for day in days):
            refuse(f"expected indices from {-n_sessions} to {n_sessions - 1}, found {shortened(days)}", *keys)
        elif _repeated([day % n_sessions for day in days]):
            refuse(f"each session once, found {days} (-1 is the last of {n_sessions})", *keys)
        elif len(days) > dataset.days_per_batch:
            refuse(f"{len(days)} sessions are more than days_per_batch ({dataset.days_per_batch})", *keys)
    unknown = [session for session in dataset.bad_trials_dict or {} if session not in sessions]
    if unknown:
        near = difflib.get_close_matches(unknown[0], sessions, 1, 0.0)[0]
        message = f"not in dataset.sessions: {shortened(unknown)}; the nearest session is {near}"
        refuse(message, "dataset.bad_trials_dict", "dataset.sessions")


def _repeated(items: Sequence) -> list:
    return sorted({item for item in items if items.count(item) > 1})
