"""The benchmarks' reference is a fair peer: on the same weights it has this project's losses and phonemes."""

import sys
from pathlib import Path

import pytest
import torch
from tiny import training_config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import reference

from backend import Backend
from ctc import greedy_collapse
from data_augmentations import gaussian_smooth
from dataset import EvalBatches
from dataset_index import index_splits
from inference import batch_logits
from loss import trial_losses
from rnn_model import build_model


@pytest.fixture(scope="module", params=["gru", "triple_gru"])
def both(simulated, tmp_path_factory, request):
    """Configuration, splits, the reference of lively weights, and this project's model of the same."""
    config = training_config(
        simulated, tmp_path_factory.mktemp("run"), model__architecture=request.param, model__n_layers=2,
        adversarial__enabled=request.param != "gru", adversarial__noise_l2_weight=0.1, model__day_layers="shared",
        model__noise_units=8, dataset__batch_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = reference.make_model(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    ours = build_model(config)
    ours.load_state_dict(reference.our_parameters(theirs))
    return config, index_splits(config, ("train", "val")), theirs.eval(), ours.eval()


def without_randomness(config):
    config = config.copy()
    config.lr_warmup_steps = config.lr_warmup_steps_day = 0
    config.model.rnn_dropout = config.model.input_network.input_layer_dropout = 0.0
    transforms = config.dataset.data_transforms
    transforms.white_noise_std = transforms.constant_offset_std = 0.0
    transforms.random_cut = 0
    return config


def test_smoothing_is_the_same():
    features = torch.randn(2, 40, 3)
    torch.testing.assert_close(reference.smooth(features, 2.0, 100), gaussian_smooth(features, 2.0, 100))


def test_the_loss_of_a_batch_is_the_same(both):
    """Of trials of one length: the reference smooths what the padding has, and this project does not."""
    config, splits, theirs, ours = both
    trials = sorted(splits["train"], key=lambda trial: trial.n_time_steps)
    length = trials[len(trials) // 2].n_time_steps
    batch = reference.read_trials([trial for trial in trials if trial.n_time_steps == length])
    features, n_time_steps = reference.transform(batch["features"], batch["n_time_steps"], config, training=False)
    labels, label_lengths = batch["labels"].long(), batch["label_lengths"]
    losses = trial_losses(ours, config, features, n_time_steps, batch["day_indices"], labels, label_lengths)
    theirs.train()
    for module in theirs.modules():
        if isinstance(module, (torch.nn.Dropout, torch.nn.RNNBase)):
            module.train(False)
    loss = reference.batch_loss(theirs, batch, config, augment=False)
    theirs.eval()
    torch.testing.assert_close(loss, losses.total.mean())


def test_every_val_trial_is_decoded_to_the_same_phonemes(both):
    config, splits, theirs, ours = both
    decoded = dict.fromkeys(range(len(splits["val"])))
    for found in batch_logits(ours, list(EvalBatches(splits["val"], config)), config, Backend("cpu")):
        for row, trial_id in enumerate(found.batch["trial_ids"].tolist()):
            if trial_id >= 0:
                decoded[trial_id] = greedy_collapse(found.logits[row, : found.lengths[row]].argmax(-1))
    assert reference.decode(theirs, splits["val"], config) == list(decoded.values())
    assert any(decoded.values())


def test_a_step_is_that_of_the_trainer_s_optimiser_on_the_same_batch(both):
    """Without anything random; the reference's warm-up begins at a rate of zero, so that its second step is taken."""
    config, splits, _, _ = both
    config = without_randomness(config)
    torch.manual_seed(0)
    theirs = reference.make_model(config)
    ours = build_model(config)
    ours.load_state_dict(reference.our_parameters(theirs))
    from optimizer import make_optimizer
    from training_step import TrainingStep

    backend = Backend("cpu")
    step = TrainingStep(ours, make_optimizer(ours, config, "cpu"), config, backend)
    optimizer, scheduler = reference.make_optimizer(theirs, config)
    trials = sorted(splits["train"], key=lambda trial: trial.n_time_steps)[:1]
    batch = EvalBatches(trials, config, batch_size=1)[0]
    for number in range(3):
        metrics = step([batch], number)
        loss = reference.train_step(theirs, optimizer, scheduler, reference.read_trials(trials), config)
        assert float(metrics[0]) == pytest.approx(loss, rel=1e-5)
    for name, value in reference.our_parameters(theirs).items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)
