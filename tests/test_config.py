"""config.py: reading, refusing, changing and saving a configuration, and the files that are shipped."""

import copy
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from config import (
    TRACKERS,
    Config,
    ConfigError,
    check_config,
    config_from_dict,
    load_config,
    n_features,
    save_config,
)
from typed_settings import look_up

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("rnn_args.yaml", "rnn_args_compact.yaml", "rnn_args_quickstart.yaml", "rnn_args_original.yaml")
OF_THREE_GRUS = {  # no file of the single GRU has them
    *("model.noise_units", "model.noise_n_layers", "model.noisy_n_layers", "model.day_layers"),
    *(f"adversarial.{key}" for key in ("grl_lambda", "noisy_loss_weight", "noise_l2_weight", "warmup_steps")),
}
MINIMAL = {"adversarial": {}, "dataset": {"sessions": ["day.1", "day.2", "day.3"]}}
SECTIONS = {"model", "model.input_network", "adversarial", "dataset", "dataset.data_transforms", "decoder"}
KEYS = sorted(set(Config._all_keys) - SECTIONS)


def leaves(section: dict, prefix: str = "") -> dict:
    """Dotted key → value of a nested dict, with bad_trials_dict as one value."""
    flat = {}
    for key, value in section.items():
        flat |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def minimal(*overrides: str) -> Config:
    return config_from_dict(MINIMAL, overrides)


def problems(*overrides: str) -> str:
    """The message for the minimal configuration with these overrides."""
    with pytest.raises(ConfigError) as caught:
        minimal(*overrides)
    return str(caught.value)


# ---- the shipped files


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_file_states_and_explains_every_key(name):
    text = (ROOT / name).read_text()
    keys = [key for key in KEYS if name != "rnn_args_original.yaml" or key not in OF_THREE_GRUS]
    assert sorted(leaves(yaml.safe_load(text))) == keys
    for key in keys:
        leaf = key.rpartition(".")[2]
        assert re.search(rf"^ *{leaf}:.*\s# \S+", text, re.M), f"{key} has no explanation in {name}"


def test_documents_scale():
    config = load_config(ROOT / "rnn_args.yaml")
    assert (config.use_tpu, config.num_tpu_cores, config.use_amp) == (True, 8, True)
    assert (config.gradient_accumulation_steps, config.dataset.batch_size) == (2, 32)
    assert config.dataset.num_dataloader_workers == 0
    assert config.adversarial.to_dict() == {
        "enabled": True,
        "grl_lambda": 0.5,
        "noisy_loss_weight": 0.2,
        "noise_l2_weight": 0.0,
        "warmup_steps": 0,
    }
    assert (config.model.noise_units, config.model.day_layers) == (7168, "per_branch")
    sessions, in_val = config.dataset.sessions, config.dataset.dataset_probability_val
    assert len(sessions) == 45 and sessions == sorted(sessions)
    assert [session for session, flag in zip(sessions, in_val, strict=True) if not flag] == [
        "t15.2023.08.11",
        "t15.2024.03.03",
        "t15.2024.04.25",
        "t15.2024.04.28",
    ]
    assert config.output_dir == str(ROOT / "trained_models/baseline_rnn")
    assert config.dataset.dataset_dir == str(ROOT / "data/hdf5_data_final")


def test_compact_scale_differs_in_the_noise_model_and_trains_without_the_adversary():
    full, compact = (leaves(load_config(ROOT / name).to_dict()) for name in SHIPPED[:2])
    different = {key: value for key, value in compact.items() if full[key] != value}
    paths = {key: different.pop(key) for key in ("output_dir", "checkpoint_dir")}
    assert paths["output_dir"] == str(ROOT / "trained_models/compact")
    assert different == {"model.noise_units": 768, "model.day_layers": "shared", "adversarial.enabled": False}


def test_the_original_s_settings_are_those_of_its_file():
    """Its own, where they are not the documents' for the triple decoder."""
    full, original = (leaves(load_config(ROOT / name).to_dict()) for name in (SHIPPED[0], SHIPPED[3]))
    different = {key: value for key, value in original.items() if full[key] != value and key not in OF_THREE_GRUS}
    for key in ("output_dir", "checkpoint_dir"):
        different.pop(key)
    assert different == {
        "gradient_accumulation_steps": 1, "model.architecture": "gru", "model.n_layers": 5,
        "adversarial.enabled": False, "dataset.batch_size": 64,
    }  # fmt: skip


# ---- access


def test_attributes_and_items_are_the_same_values():
    config = minimal()
    config.lr_max = 0.001
    assert config["lr_max"] == 0.001
    config["dataset"]["data_transforms"]["random_cut"] = 7
    assert config.dataset.data_transforms.random_cut == 7
    assert "lr_max" in config and "lr_maximum" not in config
    assert config.get("lr_max") == 0.001 and config.get("lr_maximum", 3) == 3
    assert list(config) == list(config.keys()) and dict(config.adversarial)["grl_lambda"] == 0.5


def test_unknown_attribute_is_refused_with_the_nearest_key():
    config = minimal()
    with pytest.raises(AttributeError, match=r"unknown key lr_maxx; the nearest valid key is lr_max$"):
        config.lr_maxx = 0.1
    with pytest.raises(AttributeError, match=r"nearest valid key is dataset\.batch_size"):
        _ = config.dataset.batchsize
    with pytest.raises(KeyError, match=r"nearest valid key is dataset\.batch_size"):
        config["batch_size"] = 3
    with pytest.raises(KeyError, match="nearest valid key is seed"):
        _ = config["sed"]
    assert not hasattr(config, "lr_maxx")


def test_assignment_refuses_a_wrong_value_and_keeps_the_old_one():
    config = minimal()
    with pytest.raises(ConfigError, match=r"dataset\.batch_size: expected a whole number \(at least 1\), found 0"):
        config.dataset.batch_size = 0
    with pytest.raises(ConfigError, match=r"lr_max: expected a number .* found the text 'fast'"):
        config["lr_max"] = "fast"
    assert config.dataset.batch_size == 64 and config.lr_max == 0.005


def test_assignment_takes_numpy_paths_tuples_and_whole_sections():
    config = minimal()
    config.lr_max = np.float32(0.5)
    config.dataset.feature_subset = np.arange(3)
    config.output_dir = Path("somewhere")
    config.dataset.sessions = ("a", "b")
    config.adversarial = {"grl_lambda": 2}
    assert type(config.lr_max) is float and config.dataset.feature_subset == [0, 1, 2]
    assert config.output_dir == "somewhere" and config.dataset.sessions == ["a", "b"]
    assert config.adversarial.grl_lambda == 2.0 and config.adversarial.enabled
    with pytest.raises(ConfigError, match=r"adversarial\.grl_lamda: unknown key"):
        config.adversarial = {"grl_lamda": 2}


def test_copies_are_independent():
    config = minimal()
    for other in (config.copy(), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config
        other.dataset.sessions.append("day.4")
        assert len(config.dataset.sessions) == 3
    config.to_dict()["dataset"]["sessions"].clear()
    assert len(config.dataset.sessions) == 3


def test_copying_guesses_no_misspelt_names(monkeypatch):
    """Python asks each object for names such as __setstate__; a guess at what was meant takes 10 ms, and settings go
    to the decoding processes with every trial."""
    monkeypatch.setattr("typed_settings._unknown", lambda *_: pytest.fail("asked"))
    config = minimal()
    assert pickle.loads(pickle.dumps(config)) == config.copy() == config
    assert not hasattr(config, "__setstate__")


def test_n_features_follows_the_subset():
    assert n_features(minimal()) == 512
    assert n_features(minimal("dataset.feature_subset=[0, 5, 9]")) == 3


# ---- reading and refusing


def test_all_problems_are_listed_at_once_with_file_and_key(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "lr_maxx: 1\nseed: ten\nuse_amp: 1\nadversarial: {grl_lamda: 1}\nmodel: {patch_sise: 14, n_units: 0}\n"
        "dataset:\n  sessions: [a, a]\n  data_transforms: {random_cut: 1.5}\n  batch_size: 8\n  batch_size: 9\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["lr_min=1", "dataset.sead=4", "nonsense"])
    lines = str(caught.value).splitlines()
    assert lines[0] == f"12 problems in the configuration {path}:"
    for line in (
        "  line 10: batch_size is given twice, first in line 9",
        "  dataset.sead: unknown key dataset.sead; the nearest valid key is dataset.seed",
        "  nonsense: an override is written key=value",
        "  lr_maxx: unknown key lr_maxx; the nearest valid key is lr_max",
        "  seed: expected a whole number (at least -1), found the text 'ten'",
        "  use_amp: expected true or false, found 1",
        "  adversarial.grl_lamda: unknown key adversarial.grl_lamda; the nearest valid key is adversarial.grl_lambda",
        "  model.patch_sise: unknown key model.patch_sise; the nearest valid key is model.patch_size",
        "  model.n_units: expected a whole number (at least 1), found 0",
        "  dataset.data_transforms.random_cut: expected a whole number (at least 0), found 1.5",
        "  lr_min: is above lr_max (1.0 > 0.005)",
        "  dataset.sessions: each session once; found more than once: ['a']",
    ):
        assert line in lines, line
    assert len(lines) == 13


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KEYS), st.integers(0, 30))
@example("model.noisy_n_layers", 4)
def test_a_letter_left_out_of_a_key_is_answered_with_a_valid_key(key, position):
    section, _, leaf = key.rpartition(".")
    position %= len(leaf)
    typed = f"{section}.{leaf[:position]}{leaf[position + 1 :]}".lstrip(".")
    if typed in KEYS or typed.endswith("."):  # beta0 and beta1 have no shorter neighbour
        return
    message = problems(f"{typed}=1")
    nearest = re.search(r"the nearest valid key is (\S+)", message).group(1)
    assert nearest.rpartition(".")[0] == section and nearest in KEYS
    if len(leaf) > 6 and not leaf.startswith("beta"):
        shorter = {nearest[:i] + nearest[i + 1 :] for i in range(len(nearest))}
        assert typed in shorter  # the key itself, or one as near: noise_n_layers for nois_n_layers


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mode=test", "mode: only 'train' is known"),
        ("init_from_checkpoint=true", "init_checkpoint_path: expected the run or checkpoint to start from"),
        ("gpu_number=-1", "gpu_number: expected the number of one GPU, from 0, found '-1'"),
        ("gpu_number=0,1", "gpu_number: expected the number of one GPU"),
        ("seed=-2", r"seed: expected a whole number \(at least -1\), found -2"),
        ("lr_max=0", r"lr_max: expected a number \(above 0\), found 0"),
        ("lr_max=.nan", "lr_max: expected a number .* found nan"),
        ("lr_min_day=1", r"lr_min_day: is above lr_max_day \(1.0 > 0.005\)"),
        ("lr_decay_steps=10", r"lr_warmup_steps: is above lr_decay_steps \(1000 > 10\)"),
        ("lr_scheduler_type=step", "lr_scheduler_type: expected one of cosine, linear, found the text 'step'"),
        ("log_with=visdom", "log_with: expected one of tensorboard, .* none, found the text 'visdom'"),
        ("num_training_batches=0", "num_training_batches: .* found 0"),
        ("early_stopping_val_steps=0", "early_stopping_val_steps: .* found 0"),
        ("gradient_accumulation_steps=0", "gradient_accumulation_steps: .* found 0"),
        ("use_amp='true'", "use_amp: expected true or false, found the text 'true'"),
        ("model.rnn_dropout=1", r"rnn_dropout: expected a number \(at least 0 and below 1\), found 1"),
        ("model.architecture=lstm", "model.architecture: expected one of triple_gru, gru"),
        ("model.patch_stride=0", "model.patch_stride: expected at least 1, found 0"),
        ("model.day_layers=both", "model.day_layers: expected one of per_branch, shared"),
        ("model.noise_units=0", "model.noise_units: .* found 0"),
        ("model.input_network.n_input_layers=2", "n_input_layers: must be 1, found 2"),
        ("model.input_network.input_layer_sizes=[256]", r"input_layer_sizes: must be \[512\], found \[256\]"),
        ("model.n_input_features=256", r"model.n_input_features: must equal dataset.neural_dim \(256 and 512\)"),
        ("dataset.n_classes=42", "dataset.n_classes: must be 41"),
        ("dataset.loader_shuffle=true", "dataset.loader_shuffle: must be false: the plan of batches is random"),
        ("dataset.test_percentage=0.2", "dataset.test_percentage: must be 0.1 or null"),
        ("dataset.feature_subset=[]", "dataset.feature_subset: is empty"),
        ("dataset.feature_subset=[0, 512]", r"expected indices below neural_dim \(512\), found \[512\]"),
        ("dataset.feature_subset=[3, 3]", r"each feature once; found more than once: \[3\]"),
        ("dataset.feature_subset=[3, -1]", r"feature_subset: entry 2: expected a whole number .* found -1"),
        ("dataset.feature_subset=7", "dataset.feature_subset: expected a list .* found 7"),
        ("dataset.data_transforms.random_walk_axis=0", "random_walk_axis: expected one of 1, -1, found 0"),
        ("dataset.data_transforms.smooth_kernel_std=50", "smooth_kernel_std: .* found 50"),
        ("dataset.sessions=[]", "dataset.sessions: expected the names"),
        ("dataset.sessions=[2023-08-11]", "sessions: entry 1: expected a text, found a date"),
        ("dataset.dataset_probability_val=[1, 1]", r"expected one entry a session \(3\), found 2"),
        ("dataset.dataset_probability_val=[1, 1, 0.5]", "dataset_probability_val: entry 3: .* found 0.5"),
        ("dataset.dataset_probability_val=[1, 1, 2]", "dataset_probability_val: expected 1 .* or 0"),
        ("dataset.must_include_days=[3]", "must_include_days: expected indices from -3 to 2"),
        ("dataset.must_include_days=[-4]", "must_include_days: expected indices from -3 to 2"),
        ("dataset.must_include_days=[2, -1]", "must_include_days: each session once"),
        ("dataset.bad_trials_dict={day.9: {1: [2]}}", r"not in dataset.sessions: \['day.9'\]; the nearest"),
        ("dataset.bad_trials_dict={day.1: {one: [2]}}", "bad_trials_dict: entry day.1: entry one: expected a whole"),
        ("dataset.bad_trials_dict={day.1: {1: 2}}", "entry day.1: entry 1: expected a list"),
        ("dataset.max_seq_elements=[", "dataset.max_seq_elements: the value is not valid YAML"),
        ("dataset=3", "dataset: is a section; override its keys one by one"),
        ("output_dir=", "output_dir: expected a folder, found nothing"),
    ],
)
def test_refused_in_words(override, message):
    found = problems(override)
    assert re.search(message, found), found
    assert found.startswith("1 problem in the configuration"), found


def test_rules_between_two_keys():
    assert "are more than days_per_batch (1)" in problems(
        "dataset.must_include_days=[0, 1]", "dataset.days_per_batch=1"
    )
    masks = ("dataset.data_transforms.n_channel_masks=1", "dataset.feature_subset=[1, 2]")
    assert "channel_mask_size: is above the number of features (64 > 2)" in problems(*masks)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("lr_max=1e-3", "lr_max", 0.001),
        ("lr_max=1", "lr_max", 1.0),
        ("num_training_batches=1e5", "num_training_batches", 100000),
        ("grad_norm_clip_value=0", "grad_norm_clip_value", 0.0),
        ("gpu_number=1", "gpu_number", "1"),
        ("seed=-1", "seed", -1),
        ("log_with=none", "log_with", "none"),
        ("log_with=wandb", "log_with", "wandb"),
        ("model.patch_size=0", "model.patch_size", 0),
        ("dataset.test_percentage=null", "dataset.test_percentage", None),
        ("dataset.days_per_batch=9", "dataset.days_per_batch", 9),
        ("dataset.must_include_days=[0, -1]", "dataset.must_include_days", [0, -1]),
        ("dataset.dataset_probability_val=[1, 0, 1.0]", "dataset.dataset_probability_val", [1, 0, 1]),
        ("dataset.bad_trials_dict={day.1: {'4': [0, 2]}}", "dataset.bad_trials_dict", {"day.1": {4: [0, 2]}}),
        ("dataset.data_transforms.random_walk_axis=-1", "dataset.data_transforms.random_walk_axis", -1),
        ("init_checkpoint_path=None", "init_checkpoint_path", None),
    ],
)
def test_accepted(override, key, value):
    found = look_up(minimal(override).to_dict(), key)
    assert found == value and type(found) is type(value)


def test_day_layers_may_follow_the_feature_subset():
    config = minimal("dataset.feature_subset=[1, 2]", "model.input_network.input_layer_sizes=[2]")
    assert n_features(config) == 2


def test_exponents_that_yaml_reads_as_text_are_numbers(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("lr_min: 1e-5\nlr_decay_steps: 1.2e5\nadversarial: {}\ndataset: {sessions: [a]}\n")
    config = load_config(path)
    assert config.lr_min == 1e-5 and config.lr_decay_steps == 120000
    assert "found the text '16'" in problems("dataset.batch_size='16'")


def test_later_override_wins():
    assert minimal("seed=1", "seed=2").seed == 2


def test_a_file_of_the_original_keys_means_the_single_gru():
    original = {"model": {"n_units": 768}, "init_checkpoint_path": "None", "dataset": MINIMAL["dataset"]}
    config = config_from_dict(original)
    assert (config.model.architecture, config.model.n_layers, config.adversarial.enabled) == ("gru", 5, False)
    assert config_from_dict(config.to_dict()) == config
    assert config_from_dict(original, ["model.n_layers=3"]).model.n_layers == 3
    for override in ("adversarial.enabled=false", "model.architecture=triple_gru"):
        triple = config_from_dict(original, [override])
        assert (triple.model.architecture, triple.model.n_layers) == ("triple_gru", 3)
    both = ["model.architecture=gru", "adversarial.enabled=false"]
    assert config_from_dict(original | {"adversarial": {"enabled": True}}, both).model.architecture == "gru"
    message = problems("model.architecture=gru", "adversarial.enabled=true")
    assert "adversarial.enabled: must be false with model.architecture: gru, which estimates no noise" in message


@pytest.mark.parametrize("text", ["- a\n- b\n", "lr_max: [1\n", "seed: !!python/object:os.system {}\n", "5\n"])
def test_a_file_that_is_no_configuration(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load_config(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot read the configuration file: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_a_section_that_is_no_section():
    with pytest.raises(ConfigError, match="model: expected a section of keys, found the text 'big'"):
        config_from_dict({**MINIMAL, "model": "big"})


def test_check_config_finds_what_scripts_changed():
    config = minimal()
    check_config(config)
    config.lr_min = 1.0
    config.dataset.sessions.append(3)
    config.dataset.loader_shuffle = True
    with pytest.raises(ConfigError) as caught:
        check_config(config)
    message = str(caught.value)
    assert message.startswith("3 problems") and "lr_min: is above" in message
    assert "dataset.sessions: entry 4: expected a text, found 3" in message and "loader_shuffle" in message


def test_trackers_are_those_of_accelerate():
    from accelerate.utils import LoggerType

    assert {tracker.value for tracker in LoggerType} - {"all"} == set(TRACKERS) - {"none"}


# ---- paths and saving


def test_paths_are_relative_to_the_file_and_overrides_to_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "c.yaml"
    path.write_text("output_dir: runs/a\nadversarial: {}\ndataset: {sessions: [a], dataset_dir: data}\n")
    config = load_config(path)
    assert config.output_dir == str(tmp_path / "runs/a")
    assert config.checkpoint_dir == str(tmp_path / "runs/a/checkpoint")
    assert config.dataset.dataset_dir == str(tmp_path / "data")
    config = load_config(path, ["output_dir=b: #1", "dataset.dataset_dir=~/data"])
    assert config.output_dir == str(tmp_path / "here/b: #1")
    assert config.checkpoint_dir == str(tmp_path / "here/b: #1/checkpoint")
    assert config.dataset.dataset_dir == str(Path("~/data").expanduser())


def test_checkpoint_dir_moves_with_an_overridden_output_dir(tmp_path):
    data = {**MINIMAL, "output_dir": "a", "checkpoint_dir": "a/weights"}
    assert config_from_dict(data, base_dir=tmp_path).checkpoint_dir == str(tmp_path / "a/weights")
    new = tmp_path / "new"
    assert config_from_dict(data, [f"output_dir={new}"], tmp_path).checkpoint_dir == str(new / "weights")
    both = [f"output_dir={new}", f"checkpoint_dir={tmp_path / 'c'}"]
    assert config_from_dict(data, both, tmp_path).checkpoint_dir == str(tmp_path / "c")
    apart = {**data, "checkpoint_dir": "b"}
    assert config_from_dict(apart, base_dir=tmp_path).checkpoint_dir == str(tmp_path / "b")
    moved = config_from_dict(apart, [f"output_dir={new}"], tmp_path)
    assert moved.checkpoint_dir == str(new / "checkpoint")  # else two runs would share their checkpoints


def test_checkpoint_dir_moves_with_an_assigned_output_dir(tmp_path):
    config = config_from_dict({**MINIMAL, "output_dir": "a"}, base_dir=tmp_path)
    config.output_dir = str(tmp_path / "b")
    assert config.checkpoint_dir == str(tmp_path / "b/checkpoint")
    config.checkpoint_dir = str(tmp_path / "c")
    config.output_dir = str(tmp_path / "d")
    assert config.checkpoint_dir == str(tmp_path / "c")  # chosen by the script
    config.checkpoint_dir = None
    assert config.checkpoint_dir == str(tmp_path / "d/checkpoint")


@pytest.mark.parametrize("name", SHIPPED)
def test_saved_file_reads_back_equal_from_anywhere(tmp_path, name):
    config = load_config(ROOT / name, ["dataset.bad_trials_dict={}", "lr_max=1e-3"])
    config.dataset.bad_trials_dict = {config.dataset.sessions[0]: {2: [0, 7]}}
    save_config(config, tmp_path / "args.yaml")
    assert load_config(tmp_path / "args.yaml") == config
    assert config_from_dict(config.to_dict()) == config_from_dict(config) == config
    assert sorted(path.name for path in tmp_path.iterdir()) == ["args.yaml"]


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-12, 10), st.integers(1, 10**6), st.booleans(), st.lists(st.integers(0, 511), unique=True))
def test_any_values_survive_a_dict(lr_max, steps, flag, subset):
    config = minimal()
    config.lr_max, config.lr_min, config.num_training_batches = lr_max, lr_max / 2, steps
    config.early_stopping, config.dataset.feature_subset = flag, subset or None
    assert config_from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


@pytest.mark.parametrize(("module", "uses"), [("config", {"typed_settings"}), ("typed_settings", set())])
def test_config_module_knows_nothing_of_the_project(module, uses):
    text = (ROOT / f"{module}.py").read_text()
    modules = {path.stem for path in ROOT.glob("*.py")}
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", text, re.M))
    assert imported & modules == uses and "torch" not in imported
