"""Scripts as the documents and the original repository write them, on a simulated data set."""

import json
from collections.abc import Iterator, Mapping

import pytest
import torch
import yaml
from original import original_args
from tiny import training_config
from trained_run import evaluate

from checkpointing import load_checkpoint
from rnn_model import GRUDecoder
from rnn_trainer import BrainToTextDecoder_Trainer


class Settings(Mapping):
    """What OmegaConf.load gives, as far as a script sees it: a mapping that is no dict, with attributes."""

    def __init__(self, values: dict):
        self._values = values

    def __getitem__(self, key: str):
        value = self._values[key]
        return Settings(value) if isinstance(value, dict) else value

    def __getattr__(self, key: str):
        return self[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@pytest.fixture
def args(simulated, tmp_path):
    """The original's rnn_args.yaml for the simulated data."""
    sessions = sorted(path.name for path in simulated.iterdir() if path.is_dir())
    values = original_args(tmp_path, dataset_dir=str(simulated), neural_dim=8, sessions=sessions)
    values["model"] |= {"n_input_features": 8, "patch_size": 14, "patch_stride": 4}
    values["model"]["input_network"]["input_layer_sizes"] = [8]
    return values


def test_the_original_start_script(args, simulated, tmp_path):
    trainer = BrainToTextDecoder_Trainer(Settings(args))
    metrics = trainer.train()
    assert set(metrics) == {"train_losses", "val_losses", "val_PERs", "val_metrics"}
    assert len(metrics["train_losses"]) == 4 and len(metrics["val_PERs"]) == 2
    assert isinstance(trainer.model, GRUDecoder)
    files = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*")}
    assert {"training_log", "checkpoint/best_checkpoint", "checkpoint/args.yaml", "checkpoint/val_metrics.pkl"} <= files
    listed = json.loads((tmp_path / "run" / "train_val_trials.json").read_text())
    assert sum(len(day["trials"]) for day in listed["val"].values()) == len(trainer.val_trials)
    assert listed["train"]["0"]["session_path"].endswith(f"{args['dataset']['sessions'][0]}/data_train.hdf5")
    saved = yaml.safe_load((tmp_path / "run" / "checkpoint" / "args.yaml").read_text())
    assert saved["dataset"]["sessions"] == args["dataset"]["sessions"] and saved["model"]["n_layers"] == 2
    # And its evaluation.
    results = evaluate(tmp_path / "run", device="cpu", lm="none", lexicon=None)
    assert results["per"] == trainer.best_PER


def test_omegaconf_itself(args):
    args["init_checkpoint_path"] = "/left/over"  # init_from_checkpoint is false
    omegaconf = pytest.importorskip("omegaconf")
    trainer = BrainToTextDecoder_Trainer(omegaconf.OmegaConf.create(args), device="cpu")
    assert trainer.config.lr_max_day == 0.004


def test_a_killed_run_of_the_original_architecture_goes_on_where_it_was(args, tmp_path):
    """Field case 10: the step, the schedule and the parameters are those of the run that was not stopped."""
    args |= {"num_training_batches": 6, "lr_decay_steps": 6, "batches_per_save": 2}
    whole = BrainToTextDecoder_Trainer(args | {"output_dir": str(tmp_path / "whole"), "checkpoint_dir": None}, "cpu")
    whole.train()
    stopped = BrainToTextDecoder_Trainer(args, "cpu")
    step = stopped.train_step

    def stop(batches):
        if stopped.step == 3:
            raise KeyboardInterrupt
        return step(batches)

    stopped.train_step = stop
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    resumed = BrainToTextDecoder_Trainer(args, "cpu", existing="resume")
    assert resumed.step == 2
    resumed.train()
    assert resumed.step == 6 and resumed.train_losses == whole.train_losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


# ---- the first document


@pytest.fixture
def config(simulated, tmp_path):
    return training_config(simulated, tmp_path / "run", num_training_batches=2, batches_per_val_step=2)


def test_the_custom_training_loop(config):
    trainer = BrainToTextDecoder_Trainer(config)
    num_epochs = 6
    for epoch in range(num_epochs):
        stats = trainer.train()
        if epoch % 5 == 0:
            trainer._save_checkpoint(f"epoch_{epoch}", epoch)
    assert len(stats["train_losses"]) == 2 * num_epochs
    assert [load_checkpoint(trainer.checkpoint_dir / f"epoch_{n}")["step"] for n in (0, 5)] == [2, 12]


@pytest.mark.parametrize("architecture", ["triple_gru", "gru"])
def test_model_inference(config, simulated, tmp_path, architecture):
    config.model.architecture, config.adversarial.enabled = architecture, architecture == "triple_gru"
    trained = BrainToTextDecoder_Trainer(config)
    trained.train()
    trainer = BrainToTextDecoder_Trainer(config)
    features, day_indices, n_time_steps = torch.randn(2, 60, 8), torch.tensor([0, 2]), torch.tensor([60, 41])
    before = trainer.inference(features, day_indices, n_time_steps)

    model = trainer.model
    model.load_weights(trained.checkpoint_dir / "best_checkpoint")
    logits = trainer.inference(features, day_indices, n_time_steps)
    predictions = torch.argmax(logits, axis=-1)

    assert predictions.shape == (2, 12) and not torch.equal(logits, before)
    assert torch.equal(logits, trained.inference(features, day_indices, n_time_steps))


def test_weights_of_another_model_are_refused_and_nothing_is_taken(config, tmp_path):
    trainer = BrainToTextDecoder_Trainer(config)
    trainer.train()
    config.model.n_units = 7
    other = BrainToTextDecoder_Trainer(config)
    before = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"clean_speech_model.recurrent.h0: \(1, 1, 5\) in the file, \(1, 1, 7\)"):
        other.model.load_weights(trainer.output_dir)
    assert all(torch.equal(value, before[name]) for name, value in other.model.state_dict().items())


def test_weights_of_sessions_in_another_order_are_refused(config):
    """Their day layers would go to other days, and nothing would say so."""
    trainer = BrainToTextDecoder_Trainer(config)
    trainer.train()
    config.dataset.sessions = config.dataset.sessions[::-1]
    other = BrainToTextDecoder_Trainer(config)
    with pytest.raises(ValueError, match="its sessions are others, or in another order: init_from_checkpoint"):
        other.model.load_weights(trainer.output_dir)


def test_the_grid_search_over_learning_rates(config):
    learning_rates = [0.001, 0.005, 0.01]
    found = {}
    for lr in learning_rates:
        config.lr_max = lr
        trainer = BrainToTextDecoder_Trainer(config)
        stats = trainer.train()
        found[trainer.output_dir.name] = trainer.config.lr_max, stats["train_losses"]
    assert [rate for rate, _ in found.values()] == learning_rates
    assert list(found) == ["run", "run_2", "run_3"]
    assert len({tuple(losses) for _, losses in found.values()}) == 3
