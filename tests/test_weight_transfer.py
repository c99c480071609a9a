"""Starting from another run's weights: which are taken, from where, and what is said of the rest."""

import logging

import pytest
import torch
from original import SESSIONS, write_original_run
from tiny import tiny_config

from checkpointing import CheckpointError, load_checkpoint
from rnn_model import NoiseModel, build_model
from weight_transfer import nearest_session, take_weights

SINGLE = {"model__architecture": "gru", "adversarial__enabled": False}


def checkpoint_of(config, seed=1):
    torch.manual_seed(seed)
    model = build_model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model, {
        "model_state_dict": model.state_dict(),
        "config": config.to_dict(),
        "sessions": config.dataset.sessions,
    }


def start(config, checkpoint, path="there"):
    torch.manual_seed(2)
    model = build_model(config)
    return model, take_weights(model, config, checkpoint, path)


def inputs(days=(0, 1, 2)):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(days), 21, 6, generator=generator), torch.tensor(days)


@pytest.mark.parametrize("architecture", [{}, SINGLE], ids=["triple_gru", "gru"])
def test_a_run_of_the_same_kind_is_taken_whole(architecture):
    config = tiny_config(**architecture)
    old, checkpoint = checkpoint_of(config)
    new, transfer = start(config, checkpoint)
    assert torch.equal(new.eval()(*inputs()), old.eval()(*inputs()))
    assert not transfer.fresh and not transfer.unused and len(transfer.taken) == len(old.state_dict())


@pytest.mark.parametrize("noise_units", [4, 24], ids=["projected", "full width"])
@pytest.mark.parametrize("day_layers", ["shared", "per_branch"])
def test_a_triple_decoder_starts_as_the_single_gru_that_it_was(noise_units, day_layers, caplog):
    old, checkpoint = checkpoint_of(tiny_config(**SINGLE, model__n_layers=3))
    config = tiny_config(model__n_layers=3, model__noise_units=noise_units, model__day_layers=day_layers)
    with caplog.at_level(logging.INFO, logger="b2txt"):
        new, transfer = start(config, checkpoint)
    torch.testing.assert_close(new.eval()(*inputs()), old.eval()(*inputs()))
    assert not transfer.unused
    assert {name.split(".")[0] for name in transfer.fresh} == {"noise_model", "noisy_speech_model"}
    assert "start anew: noise_model (" in caplog.text
    if day_layers == "per_branch":
        assert torch.equal(new.noise_day_layers.weights, old.day_layers.weights)


def test_layers_beyond_the_model_s_are_not_used_and_other_widths_start_anew(caplog):
    _, checkpoint = checkpoint_of(tiny_config(**SINGLE, model__n_layers=5))
    with caplog.at_level(logging.INFO, logger="b2txt"):
        _, transfer = start(tiny_config(model__n_layers=3, model__patch_size=3), checkpoint)
    assert {name.rpartition("_")[2] for name in transfer.unused} == {"l3", "l4"}
    reason = "(15, 24) there, (15, 18) here"
    assert transfer.fresh["clean_speech_model.recurrent.gru.weight_ih_l0"] == reason
    assert f"clean_speech_model.recurrent.gru.weight_ih_l0 starts anew: {reason}" in caplog.text
    assert "8 of it find no place: clean_speech_model.recurrent.gru.bias_hh_l3" in caplog.text


def test_a_single_gru_takes_the_clean_speech_model():
    old, checkpoint = checkpoint_of(tiny_config(model__n_layers=2))
    new, transfer = start(tiny_config(**SINGLE, model__n_layers=2), checkpoint)
    assert torch.equal(new.gru.weight_ih_l1, old.clean_speech_model.recurrent.gru.weight_ih_l1)
    assert torch.equal(new.h0, old.clean_speech_model.recurrent.h0) and not transfer.fresh
    assert all(name.startswith(("noise_model.", "noisy_speech_model.")) for name in transfer.unused)


def test_day_layers_go_by_session_and_a_new_session_takes_the_nearest(caplog):
    old, checkpoint = checkpoint_of(tiny_config())
    config = tiny_config(dataset__sessions="[t15.2030.01.03, t15.2030.01.01, t15.2030.02.01, t15.2029.12.30]")
    with caplog.at_level(logging.INFO, logger="b2txt"):
        new, transfer = start(config, checkpoint)
    assert torch.equal(new.day_layers.weights, old.day_layers.weights[[2, 0, 2, 0]])
    assert torch.equal(new.day_layers.biases, old.day_layers.biases[[2, 0, 2, 0]])
    assert transfer.sessions["t15.2030.02.01"] == "t15.2030.01.03"
    assert "t15.2029.12.30 starts from the day layers of t15.2030.01.01" in caplog.text


def test_the_nearest_session_is_by_date_the_later_of_two_and_the_last_where_there_are_no_dates():
    known = ["t15.2030.01.05", "t15.2030.01.01", "t15.2030.01.09"]
    assert nearest_session("t15.2030.01.01", known) == "t15.2030.01.01"
    assert nearest_session("t15.2030.01.06", known) == "t15.2030.01.05"
    assert nearest_session("t15.2030.01.07", known) == "t15.2030.01.09"
    assert nearest_session("t15.2031.01.01", known) == "t15.2030.01.09"
    assert nearest_session("t15.2030.01.02", ["tuesday", *known, "wednesday"]) == "t15.2030.01.01"
    for name, others in (("tuesday", known), ("t15.2030.01.06", ["a", "b"]), ("t15.2030.02.30", known)):
        assert nearest_session(name, others) == others[-1]


def test_a_silent_noise_model_estimates_zero_and_can_learn():
    for n_units in (4, 24):
        noise_model = NoiseModel(24, n_units)
        noise_model.start_silent()
        noise, _ = noise_model(torch.randn(5, 2, 24))
        assert torch.equal(noise, torch.zeros_like(noise))
        (noise - 1).square().sum().backward()
        assert any(parameter.grad is not None and parameter.grad.any() for parameter in noise_model.parameters())


def test_other_smoothing_is_said(caplog):
    _, checkpoint = checkpoint_of(tiny_config())
    start(tiny_config(dataset__data_transforms__smooth_kernel_std=3.0), checkpoint)
    assert "smooth_kernel_std was 2.0 there and is 3.0 here" in caplog.text


def test_a_checkpoint_of_which_no_layer_fits_is_refused():
    _, checkpoint = checkpoint_of(tiny_config(**SINGLE))
    other = {"model__n_units": 7, "model__n_input_features": 8, "model__input_network__input_layer_sizes": "[8]"}
    with pytest.raises(CheckpointError, match="there: no layer of it fits the model"):
        start(
            tiny_config(**SINGLE, **other, dataset__neural_dim=8, dataset__n_classes=41, model__n_layers=1), checkpoint
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("out.bias"), "out.bias: missing"),
        (
            lambda state: state.update({"day_layers.weights": torch.zeros(5, 6, 6)}),
            r"day_layers.weights: \(5, 6, 6\) in",
        ),
        (lambda state: state["h0"].fill_(float("nan")), "h0: holds NaN or infinity"),
    ],
    ids=["missing", "days", "NaN"],
)
def test_a_checkpoint_that_is_not_what_its_own_settings_say_is_refused(change, said):
    _, checkpoint = checkpoint_of(tiny_config(**SINGLE))
    change(checkpoint["model_state_dict"])
    with pytest.raises(CheckpointError, match=f"(?s)its parameters are not the model's:.*{said}"):
        start(tiny_config(), checkpoint)


def test_other_features_are_refused_and_another_stride_is_said(caplog):
    network = {"model__input_network__input_layer_sizes": "[2]"}
    _, checkpoint = checkpoint_of(tiny_config(dataset__feature_subset="[0, 1]", **network))
    with pytest.raises(CheckpointError, match=r"dataset.feature_subset is \(0, 1\) there and \(3, 4\) here"):
        start(tiny_config(dataset__feature_subset="[3, 4]", **network), checkpoint)
    start(tiny_config(dataset__feature_subset="[0, 1]", **network, model__patch_stride=3), checkpoint)
    assert "model.patch_stride is 2 there and 3 here" in caplog.text


# ---- in the trainer


def test_training_starts_from_a_run_of_the_original(make_trainer, tmp_path):
    original = write_original_run(tmp_path)
    days = [2, 0, 1]
    options = {
        "init_from_checkpoint": True, "init_checkpoint_path": tmp_path / "run", "output_dir": tmp_path / "mine",
        "dataset__sessions": "[" + ", ".join(SESSIONS[day] for day in days) + "]",
    }  # fmt: skip
    config = tiny_config(**options, model__n_units=8, model__n_layers=2)
    model, transfer = start(config, load_checkpoint(tmp_path / "run" / "checkpoint" / "best_checkpoint"))
    features, indices = inputs()
    expected = original(features, torch.tensor(days))
    torch.testing.assert_close(model.eval()(features, indices), expected)
    assert not transfer.unused


def test_a_second_stage_starts_where_the_first_ended_and_resumes_its_own(make_trainer, tmp_path):
    first = make_trainer(output_dir=tmp_path / "first")
    first.train()
    settings = {"init_from_checkpoint": True, "init_checkpoint_path": tmp_path / "first", "lr_max": 0.001}
    second = make_trainer(**settings)
    best = load_checkpoint(first.checkpoint_dir / "best_checkpoint")["model_state_dict"]
    assert all(torch.equal(value, best[name]) for name, value in second.model.state_dict().items())
    assert second.step == 0
    second.train()
    resumed = make_trainer(existing="resume", **settings)
    assert resumed.step == 6
    assert all(torch.equal(v, second.model.state_dict()[name]) for name, v in resumed.model.state_dict().items())


def test_a_path_that_holds_no_checkpoint_is_refused_before_anything_is_written(make_trainer, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        make_trainer(init_from_checkpoint=True, init_checkpoint_path=tmp_path / "none")
    assert not (tmp_path / "run").exists()


def test_a_run_of_the_original_is_not_resumed_but_started_from(make_trainer, tmp_path):
    write_original_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot be resumed: .* start from it .* init_from_checkpoint=true"):
        make_trainer(existing="resume", output_dir=tmp_path / "run")
