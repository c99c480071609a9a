"""The day-wise AdamW against one parameter a day, its state, and the parameter groups."""

import copy
import io

import pytest
import torch
from test_learning_rates import make_config
from torch import nn

from optimizer import (
    GROUP_NAMES,
    DayAdamW,
    learning_rates,
    make_optimizer,
    parameter_groups,
    set_learning_rates,
)


class TinyModel(nn.Module):
    """Parameter names as the decoder's."""

    def __init__(self, n_days=3, width=4):
        super().__init__()
        self.day_layers = nn.Module()
        self.day_layers.weights = nn.Parameter(torch.eye(width).repeat(n_days, 1, 1))
        self.day_layers.biases = nn.Parameter(torch.zeros(n_days, 1, width))
        self.noise_day_layers = nn.Module()
        self.noise_day_layers.weights = nn.Parameter(torch.eye(width).repeat(n_days, 1, 1))
        self.noise_day_layers.biases = nn.Parameter(torch.zeros(n_days, 1, width))
        self.gru = nn.GRU(width, width, batch_first=True)
        self.projection = nn.Linear(width, width)
        self.out = nn.Linear(width, 5)
        self.h0 = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, x, day_indices):
        noise = torch.bmm(x, self.noise_day_layers.weights.index_select(0, day_indices))
        noise = noise + self.noise_day_layers.biases.index_select(0, day_indices)
        x = torch.bmm(x, self.day_layers.weights.index_select(0, day_indices))
        x = x + self.day_layers.biases.index_select(0, day_indices) - self.projection(noise)
        return self.out(self.gru(x, self.h0.expand(-1, len(x), -1).contiguous())[0])


def random_steps(params, optimizer, n_steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n_steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            param.grad[torch.rand(len(param), generator=generator) < 0.5] = 0
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("epsilon", [0.1, 1e-8, 0.0])
@pytest.mark.parametrize("shape", [(4, 4), (1, 4), ()])
def test_equals_one_parameter_a_day(shape, epsilon, weight_decay):
    generator = torch.Generator().manual_seed(0)
    n_days, hyper = 5, {"lr": 0.01, "betas": (0.9, 0.999), "eps": epsilon, "weight_decay": weight_decay}
    stacked = nn.Parameter(torch.randn(n_days, *shape, generator=generator, dtype=torch.float64))
    apart = [nn.Parameter(row.clone()) for row in stacked.detach()]
    optimizer = DayAdamW([{"params": [stacked], "per_day": True}], **hyper)
    reference = torch.optim.AdamW(apart, **hyper)
    for step in range(120):
        present = torch.rand(n_days, generator=generator) < 0.4
        present[-1] = step >= 60  # a day that is first seen late
        grad = torch.randn(stacked.shape, generator=generator, dtype=torch.float64)
        stacked.grad = torch.where(present.view(-1, *(1,) * len(shape)), grad, 0.0)
        for day, param in enumerate(apart):
            param.grad = grad[day].clone() if present[day] else None
        for group in (*optimizer.param_groups, *reference.param_groups):
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()
        reference.step()
        torch.testing.assert_close(stacked.data, torch.stack([p.data for p in apart]), rtol=0, atol=1e-12)
    state = optimizer.state[stacked]
    assert state["step"].tolist() == [float(reference.state[p]["step"]) for p in apart]
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(
            state[key], torch.stack([reference.state[p][key] for p in apart]), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_absent_day_keeps_every_bit(dtype):
    param = nn.Parameter(torch.randn(3, 4, 4).to(dtype))
    optimizer = DayAdamW([{"params": [param], "per_day": True, "weight_decay": 0.1}], lr=0.01)
    random_steps([param], optimizer, 5, seed=1)
    before, state = param.detach().clone(), copy.deepcopy(optimizer.state[param])
    param.grad = torch.randn(3, 4, 4).to(dtype)
    param.grad[1] = 0
    optimizer.step()
    assert torch.equal(param[1], before[1])
    assert not torch.equal(param[0], before[0])
    for key, value in optimizer.state[param].items():
        assert torch.equal(value[1], state[key][1]), key
        assert not torch.equal(value[2], state[key][2]), key


def test_zero_weight_padding_trials_do_not_move_their_day():
    torch.manual_seed(0)
    model = TinyModel()
    optimizer = make_optimizer(model, make_config(weight_decay_day=0.1), "cpu")
    days, weights = torch.tensor([0, 2, 1]), torch.tensor([1.0, 1.0, 0.0])
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(torch.randn(3, 6, 4), days).square().mean((1, 2)) * weights).sum()
        loss.backward()
        optimizer.step()
    assert torch.equal(model.day_layers.weights[1], torch.eye(4))
    assert torch.equal(model.noise_day_layers.biases[1], torch.zeros(1, 4))
    assert not torch.equal(model.day_layers.weights[2], torch.eye(4))
    assert optimizer.state[model.day_layers.weights]["step"].tolist() == [3, 0, 3]


def test_nan_gradient_is_not_hidden():
    param = nn.Parameter(torch.zeros(2, 3))
    optimizer = DayAdamW([{"params": [param], "per_day": True}], lr=0.01)
    param.grad = torch.tensor([[float("nan"), 0, 0], [0, 0, 0]])
    optimizer.step()
    assert param[0].isnan().any()
    assert optimizer.state[param]["step"].tolist() == [1, 0]
    assert torch.equal(param[1], torch.zeros(3))


def test_plain_groups_are_torchs_own_and_gradient_none_is_skipped():
    torch.manual_seed(0)
    ours, days = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))
    theirs = nn.Parameter(ours.detach().clone())
    optimizer = DayAdamW(
        [{"params": [ours]}, {"params": [days], "per_day": True}], lr=0.01, weight_decay=0.1, fused=True
    )
    reference = torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1, fused=True)
    before = days.detach().clone()
    for _ in range(5):
        ours.grad = torch.randn(3, 4)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)
    assert torch.equal(days, before)
    assert days not in optimizer.state


def test_closure_sees_all_groups_and_its_loss_is_returned():
    plain, days = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    optimizer = DayAdamW([{"params": [plain]}, {"params": [days], "per_day": True}], lr=0.1)

    def closure():
        assert len(optimizer.param_groups) == 2
        optimizer.zero_grad()
        loss = plain.sum() + days.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6
    assert (plain < 1).all()
    assert (days < 1).all()


def test_learning_rate_as_a_tensor_gives_the_same():
    results = []
    for as_tensor in (False, True):
        torch.manual_seed(0)
        plain, days = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))
        lr = torch.tensor([0.01]) if as_tensor else 0.01
        optimizer = DayAdamW(
            [{"params": [plain], "lr": lr}, {"params": [days], "per_day": True, "lr": lr}],
            weight_decay=0.1,
            capturable=False,
            fused=True,
        )
        random_steps([plain, days], optimizer, 5, seed=0)
        results.append((plain.detach(), days.detach()))
    torch.testing.assert_close(results[0], results[1])


def test_settings_without_an_implementation_are_refused():
    with pytest.raises(ValueError, match="amsgrad"):
        DayAdamW([{"params": [nn.Parameter(torch.ones(2, 2))], "per_day": True}], amsgrad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("fused", [True, None])
def test_saved_and_loaded_state_continues_bit_for_bit(dtype, fused):
    def build():
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(3, 4).to(dtype)) for _ in range(2)]
        groups = [{"params": params[:1]}, {"params": params[1:], "per_day": True, "weight_decay": 0.1}]
        return params, DayAdamW(groups, lr=0.01, fused=fused)

    params, optimizer = build()
    random_steps(params, optimizer, 4, seed=0)
    stream = io.BytesIO()
    torch.save({"params": [p.data for p in params], "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    again_params, again = build()
    for param, data in zip(again_params, saved["params"], strict=True):
        param.data.copy_(data)
    again.load_state_dict(saved["optimizer"])
    for param, again_param in zip(params, again_params, strict=True):
        for key, value in optimizer.state[param].items():
            assert torch.equal(value, again.state[again_param][key]), key
            assert value.dtype == again.state[again_param][key].dtype, key
    assert again.state[again_params[1]]["step"].shape == (3,)
    random_steps(params, optimizer, 4, seed=1)
    random_steps(again_params, again, 4, seed=1)
    for param, again_param in zip(params, again_params, strict=True):
        assert torch.equal(param, again_param)


def test_loading_keeps_how_this_optimiser_is_computed():
    """A checkpoint of one device is read on another: fused there, a rate in a tensor here, or the other way round."""
    fused_model, tensor_model = TinyModel(), TinyModel()
    fused = make_optimizer(fused_model, make_config(), "cpu")
    groups = [{"params": params, "name": name} for name, params in parameter_groups(tensor_model).items()]
    groups[1]["per_day"] = True
    in_tensor = DayAdamW([{**group, "lr": torch.tensor([1.0])} for group in groups], betas=(0.5, 0.5))
    for param in fused_model.parameters():
        param.grad = torch.ones_like(param)
    fused.step()
    in_tensor.load_state_dict(fused.state_dict())
    assert [group["fused"] for group in in_tensor.param_groups] == [None] * 3
    assert [group["betas"] for group in in_tensor.param_groups] == [(0.9, 0.999)] * 3
    assert [group["per_day"] for group in in_tensor.param_groups] == [False, True, False]
    assert [group["lr"].shape for group in in_tensor.param_groups] == [(1,)] * 3
    assert in_tensor.param_groups[1]["lr"].item() == pytest.approx(0.002)
    state = in_tensor.state_dict()
    for group in state["param_groups"]:
        group["capturable"] = True  # as an optimiser on XLA saves it
        del group["per_day"]  # as torch's own AdamW saves it
    fused.load_state_dict(state)
    assert [group["capturable"] for group in fused.param_groups] == [False] * 3
    assert [group["per_day"] for group in fused.param_groups] == [False, True, False]
    assert [group["fused"] for group in fused.param_groups] == [True] * 3
    assert isinstance(fused.param_groups[0]["lr"], float)
    fused.step()


def test_loading_a_state_of_other_groups_is_refused():
    optimizer = make_optimizer(TinyModel(), make_config(), "cpu")
    state = optimizer.state_dict()
    state["param_groups"] = state["param_groups"][:2]
    with pytest.raises(ValueError, match="parameter groups"):
        optimizer.load_state_dict(state)


def test_groups_hold_every_trainable_parameter_once_under_its_rule():
    model = TinyModel()
    model.out.weight.requires_grad_(False)
    names = {id(param): name for name, param in model.named_parameters()}
    optimizer = make_optimizer(model, make_config(weight_decay_day=0.003), "cpu")
    assert [group["name"] for group in optimizer.param_groups] == list(GROUP_NAMES)
    found = [{names[id(param)] for param in group["params"]} for group in optimizer.param_groups]
    assert found[0] == {"gru.bias_ih_l0", "gru.bias_hh_l0", "projection.bias", "out.bias"}
    assert found[1] == {f"{prefix}day_layers.{kind}" for prefix in ("", "noise_") for kind in ("weights", "biases")}
    assert found[2] == {"gru.weight_ih_l0", "gru.weight_hh_l0", "projection.weight", "h0"}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.003, 0.001]
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.002, 0.005]
    assert [group["per_day"] for group in optimizer.param_groups] == [False, True, False]
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.9, 0.999), 0.1)}


def test_frozen_day_layers_leave_an_empty_group():
    model = TinyModel()
    for name, param in model.named_parameters():
        param.requires_grad_("day_layers" not in name)
    optimizer = make_optimizer(model, make_config(), "cpu")
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 0, 5]
    set_learning_rates(optimizer, 0, make_config())
    model(torch.randn(2, 3, 4), torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_model_on_another_device_is_refused():
    with pytest.raises(ValueError, match="move the model first"):
        make_optimizer(TinyModel().to("meta"), make_config(), "cpu")


def test_rates_are_set_in_place_whether_number_or_tensor():
    config = make_config()
    optimizer = make_optimizer(TinyModel(), config, "cpu")
    held = torch.tensor([7.0])
    optimizer.param_groups[1]["lr"] = held
    returned = set_learning_rates(optimizer, 300, config)
    assert returned == learning_rates(300, config)
    assert optimizer.param_groups[0]["lr"] == returned[0]
    assert optimizer.param_groups[1]["lr"] is held
    assert held.item() == pytest.approx(returned[1])
    assert optimizer.param_groups[2]["lr"] == returned[2]
