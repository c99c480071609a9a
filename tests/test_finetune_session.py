"""Adapting to a new session: what is trained, what is kept, what is written and refused."""

import json
import shutil

import pytest
import torch
from original import write_original_run
from t15_files import write_split
from trained_run import evaluate

import finetune_session
from checkpointing import CheckpointError, load_checkpoint
from dataset_index import DataError
from evaluate_model import load_model
from finetune_session import finetune

NEW = "t15.2030.02.01"


@pytest.fixture
def known(make_trainer, simulated, tmp_path):
    """A run on the simulated data's sessions, and a data set that holds a new session alone."""
    trainer = make_trainer()
    trainer.train()
    (tmp_path / "new").mkdir()
    shutil.copytree(simulated / trainer.config.dataset.sessions[-1], tmp_path / "new" / NEW)
    return trainer


def adapt(known, tmp_path, **options):
    options = {"data_dir": tmp_path / "new", "num_batches": 3, "device": "cpu"} | options
    return finetune(known.output_dir, NEW, tmp_path / "adapted", **options)


def parameters_of(path):
    model, config, _ = load_model(path)
    return model.state_dict(), config


def test_the_day_layer_alone_is_trained_from_the_nearest_session_s_and_the_old_sessions_stay(known, tmp_path):
    results = adapt(known, tmp_path, trials=5)
    old, _ = parameters_of(known.output_dir)
    new, config = parameters_of(tmp_path / "adapted")
    assert config.dataset.sessions == [*known.config.dataset.sessions, NEW]
    assert (results["started_from"], results["n_trials"]) == (known.config.dataset.sessions[-1], 5)
    for name, value in new.items():
        if "day_layers." in name:
            assert torch.equal(value[:-1], old[name])
            assert len(value) == 4 and not torch.equal(value[-1], old[name][-1])
        else:
            assert torch.equal(value, old[name]), name
    options = {"device": "cpu", "lm": "none", "lexicon": None, "output_dir": tmp_path / "results"}
    before = evaluate(known.output_dir, **options)
    sessions = known.config.dataset.sessions
    model, config, _ = load_model(tmp_path / "adapted")
    assert before["per"] == known.best_PER and model.day_layers.weights.shape[0] == len(sessions) + 1


def test_everything_is_trained_when_asked_for_but_the_adversary(known, tmp_path):
    adapt(known, tmp_path, train="everything")
    old, new = parameters_of(known.output_dir)[0], parameters_of(tmp_path / "adapted")[0]
    same = {name for name, value in old.items() if "day_layers." not in name and torch.equal(value, new[name])}
    assert same and all(name.startswith("noisy_speech_model.") for name in same)
    assert torch.equal(new["day_layers.weights"][:-1], old["day_layers.weights"])


def test_per_before_and_after_are_those_of_an_evaluation(known, tmp_path, simulated):
    results = adapt(known, tmp_path)
    assert json.loads((tmp_path / "adapted" / "finetuning.json").read_text()) == results
    # Data of all sessions, the new one among them.
    everything = tmp_path / "all"
    shutil.copytree(simulated, everything)
    shutil.copytree(tmp_path / "new" / NEW, everything / NEW)
    options = {"device": "cpu", "lm": "none", "lexicon": None, "output_dir": tmp_path / "results"}
    found = evaluate(tmp_path / "adapted", data_dir=everything, **options)
    assert found["per_by_session"][NEW] == pytest.approx(results["per_after"])
    # Its trials are the last session's: with that one's day layer they have that one's PER.
    assert results["per_before"] == pytest.approx(found["per_by_session"][results["started_from"]])


def test_a_known_session_is_adapted_in_its_place(known, tmp_path, simulated):
    session = known.config.dataset.sessions[1]
    results = finetune(known.output_dir, session, tmp_path / "adapted", num_batches=3, device="cpu")
    old, new = parameters_of(known.output_dir)[0], parameters_of(tmp_path / "adapted")[0]
    changed = [
        day for day in range(3) if not torch.equal(old["day_layers.weights"][day], new["day_layers.weights"][day])
    ]
    assert changed == [1] and results["started_from"] == session


def test_a_session_without_val_trials_is_adapted_and_its_per_is_not_known(known, tmp_path, capsys):
    (tmp_path / "new" / NEW / "data_val.hdf5").unlink()
    options = ["--model_path", str(known.output_dir), "--session", NEW, "--output_dir", str(tmp_path / "adapted")]
    options += ["--data_dir", str(tmp_path / "new"), "--num_batches", "2", "--device", "cpu"]
    assert finetune_session.main(options) == 0
    assert "its PER is not known" in capsys.readouterr().out
    assert load_checkpoint(tmp_path / "adapted" / "checkpoint" / "best_checkpoint")["step"] == 6
    assert finetune_session.main(options) == 2 and "there already" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_layer(known, tmp_path):
    adapt(known, tmp_path)
    first = parameters_of(tmp_path / "adapted")[0]["day_layers.weights"]
    shutil.rmtree(tmp_path / "adapted")
    adapt(known, tmp_path)
    assert torch.equal(parameters_of(tmp_path / "adapted")[0]["day_layers.weights"], first)


def test_an_adapted_run_is_the_start_of_another_and_is_not_resumed(known, make_trainer, tmp_path):
    adapt(known, tmp_path)
    shutil.copytree(known.config.dataset.dataset_dir, tmp_path / "all")
    shutil.copytree(tmp_path / "new" / NEW, tmp_path / "all" / NEW)
    sessions = "[" + ", ".join([*known.config.dataset.sessions, NEW]) + "]"
    settings = {"dataset__dataset_dir": tmp_path / "all", "dataset__sessions": sessions}
    start = {"init_from_checkpoint": True, "init_checkpoint_path": tmp_path / "adapted"}
    trainer = make_trainer(**settings, **start, output_dir=tmp_path / "third")
    adapted = parameters_of(tmp_path / "adapted")[0]
    assert all(torch.equal(value, adapted[name]) for name, value in trainer.model.state_dict().items())
    with pytest.raises(CheckpointError, match="no optimiser's state"):
        make_trainer(existing="resume", output_dir=tmp_path / "adapted", **settings)


def test_a_run_of_the_original_is_adapted(tmp_path):
    write_original_run(tmp_path)
    write_split(tmp_path / "data", NEW, "train", [40] * 3, n_features=6)
    finetune(tmp_path / "run", NEW, tmp_path / "adapted", num_batches=2, device="cpu")
    model, config, _ = load_model(tmp_path / "adapted")
    assert config.model.architecture == "gru" and config.dataset.sessions[-1] == NEW
    assert model.day_layers.weights.shape[0] == 4


def test_what_is_wrong_is_said_before_anything_is_written(known, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"(?s)--train is one of.*--trials is 1 or more.*--learning_rate is above 0"):
        adapt(known, tmp_path, train="head", trials=0, learning_rate=-1.0)
    with pytest.raises(DataError, match=r"has no session 't15\.2030\.03\.01'; it has t15\.2030\.01\.06, "):
        finetune(known.output_dir, "t15.2030.03.01", tmp_path / "adapted", device="cpu")
    with pytest.raises(ValueError, match="--session is the name of a folder in the data set"):
        finetune(known.output_dir, f"../new/{NEW}", tmp_path / "adapted", device="cpu")
    with pytest.raises(CheckpointError, match="no checkpoint there"):
        finetune(tmp_path / "none", NEW, tmp_path / "adapted")
    path = known.checkpoint_dir / "best_checkpoint"
    state = load_checkpoint(path)
    state["model_state_dict"].popitem()
    torch.save(state, tmp_path / "incomplete")
    with pytest.raises(CheckpointError, match="its parameters are not the model's"):
        finetune(tmp_path / "incomplete", NEW, tmp_path / "adapted", tmp_path / "new", device="cpu")
    assert not (tmp_path / "adapted").exists()


def test_a_slash_behind_the_session_s_name_is_no_other_session(known, tmp_path):
    session = known.config.dataset.sessions[1]
    assert finetune(known.output_dir, session + "/", tmp_path / "adapted", num_batches=1)["session"] == session


def test_a_diverging_training_writes_nothing(known, tmp_path):
    with pytest.raises(ValueError, match=r"diverged at batch .* lower --learning_rate"):
        adapt(known, tmp_path, train="everything", learning_rate=1e30, num_batches=25)
    assert not (tmp_path / "adapted" / "checkpoint" / "best_checkpoint").exists()
