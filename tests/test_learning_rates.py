"""The learning rates as a function of the step: ends, bounds, shape, and the day layers' own."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer import learning_rates, schedule


def make_config(**changes):
    values = {
        "lr_scheduler_type": "cosine",
        "lr_max": 0.005,
        "lr_min": 0.0001,
        "lr_decay_steps": 1000,
        "lr_warmup_steps": 10,
        "lr_max_day": 0.002,
        "lr_min_day": 0.0002,
        "lr_decay_steps_day": 500,
        "lr_warmup_steps_day": 20,
        "beta0": 0.9,
        "beta1": 0.999,
        "epsilon": 0.1,
        "weight_decay": 0.001,
        "weight_decay_day": 0.0,
    }
    return SimpleNamespace(**{**values, **changes})


rates = st.floats(1e-6, 1.0)
steps = st.integers(0, 5000)


@settings(max_examples=200, deadline=None)
@given(rates, rates, steps, steps, st.sampled_from(["cosine", "linear"]))
def test_schedule_rises_to_its_maximum_then_falls_to_its_minimum(a, b, c, d, kind):
    lr_max, lr_min = max(a, b), min(a, b)
    warmup, decay = min(c, d), max(c, d)
    steps_of = sorted({0, 1, warmup // 2, warmup, *range(0, decay + 3, max(1, decay // 50)), decay})
    values = [schedule(step, kind, lr_max, lr_min, decay, warmup) for step in steps_of]
    rising = [value for step, value in zip(steps_of, values, strict=True) if step < warmup]
    falling = [value for step, value in zip(steps_of, values, strict=True) if step >= warmup]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert all(0 < value <= lr_max for value in values)
    assert all(value >= lr_min for value in falling)
    assert schedule(decay, kind, lr_max, lr_min, decay, warmup) == lr_min
    assert schedule(10**9, kind, lr_max, lr_min, decay, warmup) == lr_min
    if warmup:
        assert schedule(warmup - 1, kind, lr_max, lr_min, decay, warmup) == lr_max
    if warmup < decay:
        assert schedule(warmup, kind, lr_max, lr_min, decay, warmup) == lr_max


def test_first_step_of_the_warm_up_is_not_zero():
    assert learning_rates(0, make_config()) == pytest.approx([0.0005, 0.0001, 0.0005])


def test_day_layers_have_a_schedule_of_their_own():
    config = make_config()
    assert learning_rates(255, config)[1] != learning_rates(255, config)[0]
    assert learning_rates(500, config)[1] == 0.0002
    assert learning_rates(1000, config) == [0.0001, 0.0002, 0.0001]
    assert learning_rates(15, config)[1] == pytest.approx(0.002 * 16 / 20)


def test_half_way_cosine_and_linear_meet_and_differ_elsewhere():
    cosine, linear = make_config(), make_config(lr_scheduler_type="linear")
    assert learning_rates(505, cosine)[0] == pytest.approx(learning_rates(505, linear)[0])
    assert learning_rates(505, cosine)[0] == pytest.approx((0.005 + 0.0001) / 2)
    assert learning_rates(200, cosine)[0] > learning_rates(200, linear)[0]
    with pytest.raises(ValueError, match="'constant'"):
        learning_rates(0, make_config(lr_scheduler_type="constant"))


def test_cosine_is_the_originals_formula_after_the_warm_up():
    config = make_config()
    for step in range(10, 1200, 7):
        progress = min((step - 10) / (1000 - 10), 1.0)
        ratio = config.lr_min / config.lr_max
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        expected = config.lr_max * max(ratio, ratio + (1 - ratio) * cosine)
        assert learning_rates(step, config)[0] == pytest.approx(expected, rel=1e-12)
