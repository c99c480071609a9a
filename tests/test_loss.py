"""The whole loss, its value and its gradient, against a float64 reference written out in plain torch."""

import pytest
import torch
from tiny import tiny_config

from loss import adversarial_ramp, mean_over_valid, trial_losses
from rnn_model import build_model

LABELS = torch.tensor([[3, 3, 7, 0], [40, 0, 0, 0], [5, 6, 5, 6]])
LABEL_LENGTHS = torch.tensor([3, 1, 4])
N_TIME_STEPS = torch.tensor([19, 14, 23])
DAYS = torch.tensor([0, 2, 0])


def case(**overrides):
    config = tiny_config(**overrides)
    torch.manual_seed(3)
    model = build_model(config).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    features = torch.randn(3, 23, 6, dtype=torch.float64)
    for row, length in enumerate(N_TIME_STEPS):
        features[row, length:] = 0
    return config, model, features


def losses_of(config, model, features, ramp=1.0):
    return trial_losses(model, config, features, N_TIME_STEPS, DAYS, LABELS, LABEL_LENGTHS, ramp)


def reference_gru(recurrent, x):
    """One trial (P, W) -> (P, H), from the equations of Cho et al. 2014 as torch.nn.GRU documents them."""
    weights = dict(recurrent.gru.named_parameters())
    for layer in range(recurrent.num_layers):
        w_ih, w_hh = weights[f"weight_ih_l{layer}"], weights[f"weight_hh_l{layer}"]
        b_ih, b_hh = weights[f"bias_ih_l{layer}"], weights[f"bias_hh_l{layer}"]
        h, outputs = recurrent.h0[0, 0], []
        for frame in x:
            i_r, i_z, i_n = (w_ih @ frame + b_ih).chunk(3)
            h_r, h_z, h_n = (w_hh @ h + b_hh).chunk(3)
            z = torch.sigmoid(i_z + h_z)
            h = (1 - z) * torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n) + z * h
            outputs.append(h)
        x = torch.stack(outputs)
    return x


def reference_ctc(logits, labels):
    """-log of the sum over alignments, by the forward recursion on probabilities."""
    extended = [0]
    for label in labels:
        extended += [label, 0]
    probabilities = logits.softmax(-1)
    alpha = {state: probabilities[0, extended[state]] for state in range(min(2, len(extended)))}
    for frame in probabilities[1:]:
        after = {}
        for state, label in enumerate(extended):
            skip = state >= 2 and label not in (0, extended[state - 2])
            before = [alpha[s] for s in (state, state - 1, *([state - 2] if skip else [])) if s in alpha]
            if before:
                after[state] = sum(before) * frame[label]
        alpha = after
    return -torch.log(sum(alpha[s] for s in (len(extended) - 1, len(extended) - 2) if s in alpha))


def reference_parts(model, features):
    """Lists over trials of clean CTC, noisy CTC and mean square noise, one trial at a time, without padding."""
    parts = ([], [], [])
    for row in range(3):
        x = features[row, : N_TIME_STEPS[row]]
        x = x @ model.day_layers.weights[DAYS[row]] + model.day_layers.biases[DAYS[row]]
        x = x / (1 + x.abs())
        x = torch.stack([x[start : start + 4].reshape(-1) for start in range(0, len(x) - 3, 2)])
        noise = reference_gru(model.noise_model.recurrent, x)
        noise = noise @ model.noise_model.projection.weight.T + model.noise_model.projection.bias
        labels = LABELS[row, : LABEL_LENGTHS[row]].tolist()
        for part, speech, signal in (
            (0, model.clean_speech_model, x - noise),
            (1, model.noisy_speech_model, noise),
        ):
            logits = reference_gru(speech.recurrent, signal) @ speech.out.weight.T + speech.out.bias
            parts[part].append(reference_ctc(logits, labels))
        parts[2].append(noise.square().mean())
    return [torch.stack(part) for part in parts]


@pytest.mark.parametrize("enabled", [True, False])
def test_value_and_gradient_equal_the_reference(enabled):
    ramp, weight, l2_weight, grl_lambda = 0.5, 0.2, 0.3, 0.7
    config, model, features = case(adversarial__enabled=enabled, adversarial__grl_lambda=grl_lambda)
    losses = losses_of(config, model, features, ramp)
    clean, noisy, noise_l2 = reference_parts(model, features)
    torch.testing.assert_close(losses.clean, clean, rtol=1e-9, atol=0)
    torch.testing.assert_close(losses.noise_l2, noise_l2, rtol=1e-9, atol=0)
    if enabled:
        torch.testing.assert_close(losses.noisy, noisy, rtol=1e-9, atol=0)
    scale = ramp * weight if enabled else 0.0
    torch.testing.assert_close(losses.total, clean + scale * noisy + l2_weight * noise_l2, rtol=1e-9, atol=0)

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(losses.total.sum(), list(trained.values()))
    plain = torch.autograd.grad(
        (clean + l2_weight * noise_l2).sum(), list(trained.values()), retain_graph=True, allow_unused=True
    )
    adversary = [None] * len(trained)
    if enabled:
        adversary = torch.autograd.grad(
            scale * noisy.sum(), list(trained.values()), retain_graph=True, allow_unused=True
        )
    for name, gradient, first, second in zip(trained, found, plain, adversary, strict=True):
        # What lies before the reversal gets the adversary's gradient times -lambda; the adversary gets its own.
        sign = 1.0 if name.startswith("noisy_speech_model.") else -ramp * grl_lambda
        zero = torch.zeros_like(gradient)
        expected = (zero if first is None else first) + sign * (zero if second is None else second)
        torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_the_single_gru_s_value_and_gradient_equal_the_reference():
    config, model, features = case(model__architecture="gru", adversarial__enabled=False, model__n_layers=2)
    losses = losses_of(config, model, features)
    expected = []
    for row in range(3):
        x = features[row, : N_TIME_STEPS[row]]
        x = x @ model.day_layers.weights[DAYS[row]] + model.day_layers.biases[DAYS[row]]
        x = x / (1 + x.abs())
        x = torch.stack([x[start : start + 4].reshape(-1) for start in range(0, len(x) - 3, 2)])
        logits = reference_gru(model, x) @ model.out.weight.T + model.out.bias
        expected.append(reference_ctc(logits, LABELS[row, : LABEL_LENGTHS[row]].tolist()))
    torch.testing.assert_close(losses.total, torch.stack(expected), rtol=1e-9, atol=0)
    assert torch.equal(losses.clean, losses.total) and losses.noisy.eq(0).all() and losses.noise_l2.eq(0).all()
    found, plain = (torch.autograd.grad(loss, list(model.parameters())) for loss in (losses.total.sum(), sum(expected)))
    for gradient, reference in zip(found, plain, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("architecture", ["triple_gru", "gru"])
def test_padding_changes_neither_loss_nor_gradient(architecture):
    config, model, features = case(model__architecture=architecture, adversarial__enabled=architecture == "triple_gru")
    losses = losses_of(config, model, features)
    gradients = torch.autograd.grad(losses.total.sum(), list(model.parameters()))
    padded = torch.cat([features, torch.randn(3, 17, 6, dtype=torch.float64)], dim=1)
    losses_padded = losses_of(config, model, padded)
    gradients_padded = torch.autograd.grad(losses_padded.total.sum(), list(model.parameters()))
    for alone, beside in zip((*losses, *gradients), (*losses_padded, *gradients_padded), strict=True):
        torch.testing.assert_close(alone, beside, rtol=1e-10, atol=1e-12)


def test_the_noise_of_padding_is_not_counted():
    noise_power = torch.ones(2, 5)
    noise_power[0, 2:] = 100.0
    assert mean_over_valid(noise_power, torch.tensor([2, 5])).tolist() == [1.0, 1.0]
    assert mean_over_valid(noise_power, torch.tensor([0, 5])).tolist() == [0.0, 1.0]


def test_the_ramp_rises_to_one_over_the_warm_up():
    assert [adversarial_ramp(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert adversarial_ramp(0, 0) == 1.0
