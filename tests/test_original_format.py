"""The original's checkpoints and settings: read, refused, written, and trained on by the original's optimiser."""

import argparse
import logging
import math

import h5py
import pytest
import torch
import yaml
from original import (
    SESSIONS,
    OriginalDecoder,
    original_args,
    original_optimizer,
    tiny_original,
    write_original_run,
)
from t15_files import write_split
from trained_run import evaluate, rows_of

import convert_checkpoint
from checkpointing import CheckpointError, load_checkpoint
from config import config_from_dict
from ctc import greedy_collapse
from data_augmentations import transform_data
from evaluate_model import load_model
from evaluate_model_helpers import edit_distance, phonemes_to_text
from optimizer import make_optimizer
from original_format import original_args as written_args
from original_format import per_day, stacked
from rnn_model import GRUDecoder, build_model


def inputs(n_bins=19, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, n_bins, 6, dtype=torch.float64, generator=generator).to(dtype), torch.tensor([0, 2, 1, 2])


@pytest.mark.parametrize("patches", [(4, 2), (3, 5), (0, 0)])
def test_the_decoder_is_the_original_formula(patches):
    torch.manual_seed(0)
    original = OriginalDecoder(6, 8, 3, 41, 3, *patches).double()
    ours = GRUDecoder(6, 8, 3, 41, n_layers=3, patch_size=patches[0], patch_stride=patches[1]).double().eval()
    ours.load_state_dict(stacked(original.state_dict()))
    torch.testing.assert_close(ours(*inputs()), original(*inputs()), rtol=0, atol=1e-12)


def test_names_and_shapes_are_the_original_s_and_come_back_as_they_were():
    original = tiny_original().state_dict()
    there = stacked(original)
    assert there["day_layers.weights"].shape == (3, 6, 6) and there["day_layers.biases"].shape == (3, 1, 6)
    back = per_day(there)
    assert list(back) == list(original)
    for name, value in original.items():
        assert torch.equal(back[name], value), name


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod.", "model.anything."])
def test_a_run_of_the_original_is_opened_whatever_wrapped_its_names(tmp_path, prefix):
    original = write_original_run(tmp_path, prefix)
    model, config, checkpoint = load_model(tmp_path / "run")
    torch.testing.assert_close(model(*inputs(dtype=torch.float32)), original(*inputs(dtype=torch.float32)))
    assert config.model.architecture == "gru" and config.dataset.sessions == SESSIONS
    assert config.dataset.data_transforms.smooth_kernel_std == 2
    assert checkpoint["val_PER"] == 0.101 and checkpoint["step"] == 0


def test_11_a_cuda_checkpoint_is_read_on_a_machine_without_cuda(tmp_path):
    """Its storages are tagged cuda:1, which this machine need not have."""
    write_original_run(tmp_path)
    path = tmp_path / "run" / "checkpoint" / "best_checkpoint"
    tag_as_cuda(path)
    assert b"cuda:1" in path.read_bytes()
    model, _, _ = load_model(tmp_path / "run")
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def tag_as_cuda(path):
    """Rewrite the checkpoint so that each tensor claims to have lain on cuda:1."""
    state = torch.load(path, weights_only=False)
    registry = torch.serialization._package_registry
    registry.insert(0, (0, lambda _: "cuda:1", lambda *_: None))
    try:
        torch.save(state, path)
    finally:
        registry.pop(0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("out.weight"), "out.weight: missing"),
        (lambda state: state.update({"gru.weight_ih_l2": torch.zeros(24, 8)}), "gru.weight_ih_l2: no parameter of the"),
        (lambda state: state.update({"out.bias": torch.zeros(40)}), r"out.bias: \(40,\) in the file, \(41,\) in the m"),
        (lambda state: state.pop("day_weights.1"), "day_weights.1: missing"),
        (lambda state: state.update({"attention.weight": torch.zeros(2)}), "attention.weight: no parameter of the ori"),
        (lambda state: state.update({"module.h0": torch.zeros(1, 1, 8)}), "module.h0: the second of that name"),
        (lambda state: state.update({"day_biases.0": torch.zeros(1, 5)}), "day_biases: of several shapes"),
        (lambda state: (state.pop("day_weights.2"), state.pop("day_biases.2")), r"weights: \(2, 6, 6\) .* \(3, 6, 6\)"),
    ],
    ids=["missing", "layer", "shape", "day", "unknown", "twice", "shapes", "sessions"],
)
def test_12_parameters_that_differ_are_listed_and_never_passed_over(tmp_path, change, said):
    write_original_run(tmp_path)
    path = tmp_path / "run" / "checkpoint" / "best_checkpoint"
    state = torch.load(path, weights_only=False)
    change(state["model_state_dict"])
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=said) as error:
        load_model(tmp_path / "run")
    assert str(path) in str(error.value)


def test_objects_in_a_checkpoint_are_refused_and_read_where_trusted(tmp_path):
    write_original_run(tmp_path)
    path = tmp_path / "run" / "checkpoint" / "best_checkpoint"
    state = torch.load(path, weights_only=False)
    torch.save(state | {"args": argparse.Namespace(lr=1)}, path)
    with pytest.raises(CheckpointError, match=r"argparse\.Namespace.*--trust_checkpoint"):
        load_checkpoint(path)
    assert load_checkpoint(path, trust=True)["step"] == 0


def test_a_checkpoint_without_its_settings_is_refused_with_the_option_that_names_them(tmp_path):
    write_original_run(tmp_path)
    settings = tmp_path / "run" / "checkpoint" / "args.yaml"
    settings.rename(tmp_path / "kept.yaml")
    path = tmp_path / "run" / "checkpoint" / "best_checkpoint"
    with pytest.raises(CheckpointError, match=r"there is no .*args\.yaml.*--config_path"):
        load_checkpoint(path)
    assert load_checkpoint(path, original_settings=tmp_path / "kept.yaml")["sessions"] == SESSIONS


def test_settings_that_say_nothing_of_a_trained_model_may_be_anything(tmp_path):
    write_original_run(tmp_path, test_percentage=0.2, loader_shuffle=True, must_include_days=[7])
    path = tmp_path / "run" / "checkpoint" / "args.yaml"
    args = yaml.safe_load(path.read_text()) | {"mode": "test", "gpu_number": "cuda:0", "init_checkpoint_path": "/x"}
    path.write_text(yaml.safe_dump(args))
    load_model(tmp_path / "run")
    args["dataset"]["sessions"] = []
    path.write_text(yaml.safe_dump(args))
    with pytest.raises(CheckpointError, match=r"args\.yaml: .*(?s:.*)dataset\.sessions: expected"):
        load_model(tmp_path / "run")


@pytest.mark.parametrize("value", [torch.zeros(2), "x", None], ids=["two numbers", "text", "nothing"])
def test_a_val_per_that_is_no_number_hinders_nothing(tmp_path, value):
    write_original_run(tmp_path)
    path = tmp_path / "run" / "checkpoint" / "best_checkpoint"
    torch.save(torch.load(path, weights_only=False) | {"val_PER": value}, path)
    assert math.isnan(load_checkpoint(path)["val_PER"])


def test_keys_that_only_the_original_s_forks_know_are_said_and_passed_over(tmp_path, caplog):
    write_original_run(tmp_path, wavelet="haar")
    with caplog.at_level(logging.WARNING, logger="b2txt"):
        load_model(tmp_path / "run")
    assert "args.yaml: dataset.wavelet is unknown and not used" in caplog.text


def test_13_a_run_of_the_original_is_evaluated_with_its_own_preprocessing_whatever_the_configuration_says(
    tmp_path, caplog
):
    original = write_original_run(tmp_path)
    for number, session in enumerate(SESSIONS):
        write_split(tmp_path / "data", session, "val", [40, 61], seed=number, n_features=6)
    args = original_args(tmp_path, neural_dim=6)
    args["dataset"]["data_transforms"]["smooth_kernel_std"] = 9
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(args))
    with caplog.at_level(logging.WARNING, logger="b2txt"):
        results = evaluate(tmp_path / "run", tmp_path / "other.yaml", device="cpu", lm="none")
    assert "smooth_kernel_std is 9.0 in the configuration and 2.0 in the checkpoint; the checkpoint's" in caplog.text
    rows = rows_of(tmp_path / "run" / "predictions_val.csv")
    edits = 0
    for day, session in enumerate(SESSIONS):
        with h5py.File(tmp_path / "data" / session / "data_val.hdf5") as file:
            for key in sorted(file):
                features = torch.from_numpy(file[key]["input_features"][()])[None]
                lengths = torch.tensor([features.shape[1]])
                transforms = config_from_dict(original_args(tmp_path)).dataset.data_transforms
                features, _ = transform_data(features, lengths, transforms, training=False)
                decoded = greedy_collapse(original(features, torch.tensor([day]))[0].argmax(-1))
                assert phonemes_to_text(decoded) == rows.pop(0)["predicted_phonemes"]
                edits += edit_distance([5, 5, 40], decoded)
    assert results["per"] == edits / (6 * 3) and not rows


# ---- writing


def trained(tmp_path):
    """Our decoder after two steps, the second without day 0, and its checkpoint."""
    config = config_from_dict(original_args(tmp_path))
    torch.manual_seed(3)
    model = build_model(config)
    optimizer = make_optimizer(model, config, "cpu")
    for days in ([0, 2, 2, 2], [2, 2, 2, 2]):  # day 1 never
        step(model, optimizer, torch.tensor(days))
    transforms = config.dataset.data_transforms
    checkpoint = {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "step": 2,
        "config": config.to_dict(),
        "preprocessing": {key: transforms[key] for key in transforms if key.startswith("smooth")},
        "sessions": SESSIONS,
        "val_PER": 0.5,
        "val_loss": 3.0,
    }
    (tmp_path / "ours" / "checkpoint").mkdir(parents=True)
    torch.save(checkpoint, tmp_path / "ours" / "checkpoint" / "best_checkpoint")
    return model, optimizer


def step(model, optimizer, days):
    model.eval()
    optimizer.zero_grad()
    features, _ = inputs(dtype=torch.float32)
    model(features, days).square().mean().backward()
    optimizer.step()


def test_a_converted_checkpoint_is_the_same_decoder_in_the_original_s_code_and_trains_on_there(tmp_path, capsys):
    ours, optimizer = trained(tmp_path)
    arguments = ["--model_path", str(tmp_path / "ours"), "--output_dir", str(tmp_path / "new")]
    assert convert_checkpoint.main(arguments) == 0 and "best_checkpoint" in capsys.readouterr().out
    # As the original's trainer loads it.
    saved = torch.load(tmp_path / "new" / "checkpoint" / "best_checkpoint", weights_only=False)
    theirs = tiny_original(seed=5)
    torch.nn.ModuleDict({"_orig_mod": theirs}).load_state_dict(saved["model_state_dict"])  # of torch.compile
    their_optimizer = original_optimizer(theirs)
    scheduler = torch.optim.lr_scheduler.LambdaLR(their_optimizer, [lambda _: 1.0] * 3)
    their_optimizer.load_state_dict(saved["optimizer_state_dict"])
    scheduler.load_state_dict(saved["scheduler_state_dict"])
    assert saved["val_PER"] == 0.5 and scheduler.last_epoch == 2
    for days in (torch.tensor([0, 1, 2, 2]), torch.tensor([1, 1, 0, 0])):
        features, _ = inputs(dtype=torch.float32)
        torch.testing.assert_close(theirs(features, days), ours(features, days), rtol=1e-5, atol=1e-6)
        step(ours, optimizer, days)
        step(theirs, their_optimizer, days)
    for name, value in per_day(ours.state_dict()).items():
        torch.testing.assert_close(theirs.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_converted_settings_have_the_original_s_keys_and_values(tmp_path):
    args = original_args(tmp_path)
    assert flat(written_args(config_from_dict(args))) == flat(args) | {"init_checkpoint_path": None}


def flat(settings, prefix=""):
    found = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def test_a_converted_run_is_opened_here_again_and_converts_to_itself(tmp_path):
    ours, _ = trained(tmp_path)
    convert_checkpoint.convert(tmp_path / "ours", tmp_path / "new")
    model, _, checkpoint = load_model(tmp_path / "new")
    assert torch.equal(model(*inputs(dtype=torch.float32)), ours.eval()(*inputs(dtype=torch.float32)))
    assert checkpoint["step"] == 2 and checkpoint["val_loss"] == 3.0
    convert_checkpoint.convert(tmp_path / "new", tmp_path / "again")
    states = [
        torch.load(tmp_path / name / "checkpoint" / "best_checkpoint")["optimizer_state_dict"]["state"]
        for name in ("new", "again")
    ]
    assert states[0] and all(torch.equal(states[0][i]["exp_avg"], states[1][i]["exp_avg"]) for i in states[0])
    first, second = (
        torch.load(tmp_path / name / "checkpoint" / "best_checkpoint", weights_only=True)["model_state_dict"]
        for name in ("new", "again")
    )
    assert list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def test_a_causal_decoder_is_not_handed_to_code_that_would_smooth_over_later_bins(tmp_path):
    trained(tmp_path)
    path = tmp_path / "ours" / "checkpoint" / "best_checkpoint"
    state = torch.load(path)
    state["config"]["dataset"]["data_transforms"]["smooth_causal"] = True
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="smooth_causal"):
        convert_checkpoint.convert(tmp_path / "ours", tmp_path / "new")
    state["config"]["dataset"]["data_transforms"]["smooth_data"] = False  # nothing is smoothed, there or here
    torch.save(state, path)
    convert_checkpoint.convert(tmp_path / "ours", tmp_path / "new")


def test_a_checkpoint_without_an_optimiser_s_state_gets_that_of_a_training_that_begins(tmp_path):
    trained(tmp_path)
    path = tmp_path / "ours" / "checkpoint" / "best_checkpoint"
    state = torch.load(path)
    del state["optimizer_state_dict"]
    torch.save(state, path)
    convert_checkpoint.convert(path, tmp_path / "new")
    saved = torch.load(tmp_path / "new" / "checkpoint" / "best_checkpoint")
    theirs = tiny_original()
    optimizer = original_optimizer(theirs)
    optimizer.load_state_dict(saved["optimizer_state_dict"])
    step(theirs, optimizer, torch.tensor([0, 1, 2, 2]))
    assert len(optimizer.state) == len(list(theirs.parameters()))


def test_what_cannot_be_converted_is_refused_and_nothing_is_overwritten(tmp_path, capsys):
    trained(tmp_path)
    path = tmp_path / "ours" / "checkpoint" / "best_checkpoint"
    arguments = ["--model_path", str(path), "--output_dir", str(tmp_path / "new")]
    assert convert_checkpoint.main(arguments) == 0
    before = (tmp_path / "new" / "checkpoint" / "best_checkpoint").read_bytes()
    assert convert_checkpoint.main(arguments) == 2 and "there already" in capsys.readouterr().err
    assert (tmp_path / "new" / "checkpoint" / "best_checkpoint").read_bytes() == before
    state = torch.load(path)
    state["model_state_dict"] = {"noise_model.h0": torch.zeros(1)} | state["model_state_dict"]
    torch.save(state, path)
    arguments[-1] = str(tmp_path / "other")
    assert convert_checkpoint.main(arguments) == 2
    assert "only a single-GRU decoder" in capsys.readouterr().err and not (tmp_path / "other").exists()
