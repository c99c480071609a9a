"""One AdamW for the whole model, and its learning rates as a pure function of the step.

The day layers of all days stand in one tensor (D, ...), so that a batch takes its days by `index_select`. A
plain AdamW would then move a day that is absent from the batch too, by its old momentum and by weight decay.
The original decoder had a parameter for each day, whose gradient is None where the day is absent; `DayAdamW`
behaves as that did.

Axes: D days. Learning rates: linear warm-up, then a cosine or a line down to the least rate.
"""

import math

import torch

GROUP_NAMES = ("bias", "day_layers", "other")


class DayAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter, ICLR 2019) that leaves absent days alone.

    Groups with `per_day: True` hold tensors whose first axis is the day. A day whose row of the gradient is
    zero throughout (absent from the batch, or there in zero-weight padding trials only) gets no update: no
    step of its moments, no weight decay, no step count. Its state: `step` (D,) float32, `exp_avg` and
    `exp_avg_sq` as the tensor. A NaN in a gradient counts as present, so that a divergence is not hidden. All
    other groups are torch's own, but for those with `capturable: True` (on XLA): their parameters share one step
    count, from which the corrections are computed once, and not with torch's loss of digits.

    Nothing here waits for the device, and shapes are constant. The learning rate is a float or a tensor of
    one element.
    """

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        # The update of the days does not read a gradient scaler's found_inf: the scaler then skips the step
        # itself.
        self._step_supports_amp_scaling = False

    def add_param_group(self, param_group):
        """Adds a group; `per_day` (False) says whether the first axis of its tensors is the day."""
        param_group.setdefault("per_day", False)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        unsupported = [key for key in ("amsgrad", "maximize", "differentiable") if group[key]]
        if group["per_day"] and unsupported:
            raise ValueError(f"DayAdamW: {', '.join(unsupported)} is not made for a group with per_day=True")

    @torch.no_grad()
    def step(self, closure=None):
        """One step from the gradients at hand. Returns the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        all_groups = self.param_groups
        # torch's own step sees the plain groups only, with whichever implementation they ask for (fused,
        # capturable).
        self.param_groups = [group for group in all_groups if not group["per_day"] and not group["capturable"]]
        try:
            super().step()
        finally:
            self.param_groups = all_groups
        for group in all_groups:
            if group["per_day"]:
                for param in group["params"]:
                    if param.grad is not None:
                        self._step_days(param, group)
            elif group["capturable"] and group["params"]:
                self._step_together(group)
        return loss

    def create_state(self) -> None:
        """Creates every parameter's state, as its first step would: on XLA that step is then no other program."""
        for group in self.param_groups:
            for param in group["params"]:
                steps = torch.zeros(param.shape[0], device=param.device) if group["per_day"] else torch.zeros(())
                self.state[param] = {
                    "step": steps,
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
            self._share_steps(group)

    def _share_steps(self, group: dict) -> None:
        """Makes the step counts of a capturable group one tensor."""
        states = [self.state[param] for param in group["params"] if param in self.state]
        if states and group["capturable"] and not group["per_day"]:
            # As one element of an axis: XLA takes two numbers of the same value, of two groups, for one.
            count = states[0]["step"].cpu().reshape(1).to(group["params"][0].device).reshape(())
            for state in states:
                state["step"] = count

    def _step_together(self, group: dict) -> None:
        """Updates the parameters of a capturable group, all of which have gradients and state, in place."""
        beta0, beta1 = group["betas"]
        first = group["params"][0]
        steps = self.state[first]["step"].add_(1)
        counts = steps.to(torch.promote_types(first.dtype, torch.float32)).reshape(1)
        lr = group["lr"].to(counts.dtype)
        step_size, root_correction = lr / _bias_correction(beta0, counts), _bias_correction(beta1, counts).sqrt()
        decay = 1 - lr * group["weight_decay"]
        for param in group["params"]:
            state, grad = self.state[param], param.grad
            exp_avg = state["exp_avg"].mul_(beta0).add_(grad, alpha=1 - beta0)
            exp_avg_sq = state["exp_avg_sq"].mul_(beta1).addcmul_(grad, grad, value=1 - beta1)
            denominator = exp_avg_sq.sqrt().div_(root_correction).add_(group["eps"])
            param.mul_(decay).sub_(exp_avg.div(denominator).mul_(step_size))

    def _step_days(self, param: torch.Tensor, group: dict) -> None:
        """Updates the present days of param (D, ...) in place; on a CPU those alone are touched.

        Elsewhere how many are present is not known before the device is waited for. There a mask acts through
        coefficients of shape (D, 1, ...), which are 1 or 0 for absent days: multiplying a row by 1 and adding 0 leaves
        it bit for bit, and costs no pass over the whole tensor.
        """
        state, grad = self.state[param], param.grad
        if not state:
            state["step"] = torch.zeros(param.shape[0], dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        # (D,); of all tests the quickest on a CPU
        present = torch.linalg.vector_norm(grad.reshape(len(grad), -1), 1, dim=1) != 0
        if param.device.type != "cpu" or present.all():
            self._update_days(param, grad, state, present, group)
            return
        days = present.nonzero().flatten()
        rows, parts = param[days], {name: values[days] for name, values in state.items()}
        self._update_days(rows, grad[days], parts, present[days], group)
        param[days] = rows
        for name, values in parts.items():
            state[name][days] = values

    def _update_days(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        state: dict[str, torch.Tensor],
        present: torch.Tensor,
        group: dict,
    ) -> None:
        """The update itself, in place, of the days at hand; `present` (D,) says which of them had trials."""
        beta0, beta1 = group["betas"]
        exp_avg, exp_avg_sq, steps = state["exp_avg"], state["exp_avg_sq"], state["step"]
        steps.add_(present.to(steps.dtype))

        def by_day(if_present, if_absent: float) -> torch.Tensor:
            coefficient = torch.where(present, if_present, if_absent)
            return coefficient.view(-1, *(1,) * (param.dim() - 1)).to(param.dtype)

        # Counts to float64 where the parameters are; a day never seen counts as 1, only to keep 0 / 0 away.
        counts = steps.to(torch.promote_types(param.dtype, torch.float32)).clamp(min=1)
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):
            lr = lr.to(counts.dtype)
        one = torch.ones_like(counts)
        step_size = lr / _bias_correction(beta0, counts)
        root_correction = _bias_correction(beta1, counts).sqrt()

        if group["weight_decay"] != 0:
            param.mul_(by_day(one - lr * group["weight_decay"], 1.0))
        exp_avg.mul_(by_day(one * beta0, 1.0)).add_(grad, alpha=1 - beta0)
        exp_avg_sq.mul_(by_day(one * beta1, 1.0)).addcmul_(grad, grad, value=1 - beta1)
        # An absent day gets 1 for epsilon: with an epsilon of 0, a day never seen would be 0 / 0.
        denominator = exp_avg_sq.sqrt().div_(by_day(root_correction, 1.0)).add_(by_day(one * group["eps"], 1.0))
        param.addcmul_(exp_avg.div(denominator), by_day(-step_size, 0.0))

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state of any device: how this optimiser is computed (fused, capturable, a rate in a tensor)
        is kept.

        torch would take those from the checkpoint, and would leave the step counts where the checkpoint had
        them.
        """
        saved = state_dict["param_groups"]
        if len(saved) == len(self.param_groups):  # if not, torch says so
            merged = [_keep_implementation(old, new) for old, new in zip(self.param_groups, saved, strict=True)]
            state_dict = {**state_dict, "param_groups": merged}
            for group in merged:
                together = group["params"] if group["capturable"] and not group["per_day"] else []
                states = [state_dict["state"][i] for i in together if i in state_dict["state"]]
                if len({float(state["step"]) for state in states}) > 1:
                    raise ValueError(f"DayAdamW: the parameters of group {group.get('name')!r} differ in their steps")
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            on_device = group["per_day"] or group["fused"] or group["capturable"]
            for param in group["params"]:
                state = self.state.get(param, {})
                if "step" in state:
                    device = param.device if on_device else "cpu"
                    state["step"] = state["step"].to(device=device, dtype=torch.float32)
            self._share_steps(group)


def _bias_correction(beta: float, counts: torch.Tensor) -> torch.Tensor:
    """1 - beta ** counts, (D,). By expm1, since 1 - 0.999 in float32 has lost half of its digits."""
    if beta == 0:
        return torch.ones_like(counts)
    return -torch.expm1(counts * math.log(beta))


def _keep_implementation(group: dict, saved: dict) -> dict:
    """The saved group's settings, with those of `group` that belong to the device or the model."""
    kept = {key: group[key] for key in ("fused", "foreach", "capturable", "per_day")}
    lr = saved["lr"]
    if isinstance(group["lr"], torch.Tensor):
        kept["lr"] = torch.as_tensor(lr).to(group["lr"]).reshape(group["lr"].shape)
    else:
        kept["lr"] = float(lr)
    return {**saved, **kept}


def parameter_groups(model: torch.nn.Module) -> dict[str, list[torch.nn.Parameter]]:
    """The trainable parameters by group: 'bias', 'day_layers', 'other', in the model's order.

    The learnable initial states (h0) are in 'other' and hence decayed, as in the original.
    """
    groups = {name: [] for name in GROUP_NAMES}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        if "day_layers." in name:
            groups["day_layers"].append(param)
        elif "bias" in name.rpartition(".")[2]:
            groups["bias"].append(param)
        else:
            groups["other"].append(param)
    return groups


def make_optimizer(model: torch.nn.Module, config, device: torch.device | str) -> DayAdamW:
    """The optimiser of a model that already stands on its device.

    Args:
        model: its parameters with `requires_grad` are taken.
        config: lr_max, lr_max_day, weight_decay, weight_decay_day, beta0, beta1, epsilon.
        device: of the parameters. cpu and cuda take torch's fused step. On xla the learning rate and all step
            counts are tensors on the device: as Python numbers, a correction that reaches exactly 1 would
            compile anew.
    Returns:
        DayAdamW with the groups 'bias' (not decayed), 'day_layers' (per_day, settings of its own) and
        'other', in this order; a group without trainable parameters is there and empty. The rates are those
        of `learning_rates`.
    Raises:
        ValueError: a parameter stands on another device.
    """
    device = torch.device(device)
    groups = parameter_groups(model)
    elsewhere = {p.device.type for params in groups.values() for p in params} - {device.type}
    if elsewhere:
        raise ValueError(
            f"make_optimizer: the model stands on {', '.join(sorted(elsewhere))}, the optimiser is for "
            f"{device.type}; move the model first"
        )

    dtype = next((p.dtype for params in groups.values() for p in params), torch.float32)

    def rate(value: float):
        return torch.tensor([value], dtype=dtype).to(device) if device.type == "xla" else value

    per_group = [
        {"name": "bias", "lr": rate(config.lr_max), "weight_decay": 0.0},
        {
            "name": "day_layers",
            "lr": rate(config.lr_max_day),
            "weight_decay": config.weight_decay_day,
            "per_day": True,
        },
        {"name": "other", "lr": rate(config.lr_max), "weight_decay": config.weight_decay},
    ]
    optimizer = DayAdamW(
        [{**settings, "params": groups[settings["name"]]} for settings in per_group],
        betas=(config.beta0, config.beta1),
        eps=config.epsilon,
        fused=device.type in ("cpu", "cuda") or None,
        capturable=device.type == "xla",
    )
    if device.type == "xla":
        optimizer.create_state()
    return optimizer


def schedule(step: int, kind: str, lr_max: float, lr_min: float, decay_steps: int, warmup_steps: int) -> float:
    """Learning rate of optimiser step `step`, counted from 0.

    Args:
        kind: 'cosine' or 'linear', from lr_max to lr_min.
        decay_steps: the first step at lr_min, counted from 0, not from the end of the warm-up.
        warmup_steps: the rate rises as (step + 1) / warmup_steps and is lr_max at step warmup_steps - 1. (The
            original rises as step / warmup_steps, and so spends its first step at a rate of exactly zero.)
    """
    if kind not in ("cosine", "linear"):
        raise ValueError(f"lr_scheduler_type is {kind!r}; it is 'cosine' or 'linear'")
    if step < warmup_steps:
        return lr_max * ((step + 1) / warmup_steps)
    if step >= decay_steps:
        return lr_min
    progress = (step - warmup_steps) / (decay_steps - warmup_steps)
    gone = 0.5 * (1 - math.cos(math.pi * progress)) if kind == "cosine" else progress
    return max(lr_max - (lr_max - lr_min) * gone, lr_min)


def learning_rates(step: int, config) -> list[float]:
    """Learning rates of optimiser step `step` (from 0) for the groups 'bias', 'day_layers', 'other'."""
    kind = config.lr_scheduler_type
    rate = schedule(step, kind, config.lr_max, config.lr_min, config.lr_decay_steps, config.lr_warmup_steps)
    rate_day = schedule(
        step,
        kind,
        config.lr_max_day,
        config.lr_min_day,
        config.lr_decay_steps_day,
        config.lr_warmup_steps_day,
    )
    return [rate, rate_day, rate]


def set_learning_rates(optimizer: torch.optim.Optimizer, step: int, config) -> list[float]:
    """Sets the rates of step `step` in the optimiser of `make_optimizer`, and returns them."""
    rates = learning_rates(step, config)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            # A copy from the host, not fill_: a fill with exactly 0 or 1 would be another graph on XLA.
            group["lr"].copy_(torch.tensor([rate], dtype=group["lr"].dtype).reshape(group["lr"].shape))
        else:
            group["lr"] = rate
    return rates
