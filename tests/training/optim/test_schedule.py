"""The learning rate of each step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt import lr_at_step

HALF = {"warmup_steps": 0, "base_lr": 0.5, "min_lr": 0.1}


@pytest.mark.parametrize(
    ("total", "options", "rates"),
    [
        (2000, {}, {0: 0.0, 200: 3e-4, 1999: 3e-5}),  # the three corners with the defaults
        # Warm-up 10, decay over 90 steps from 1 to 0.1; a third of it is (1 + cos 60°) / 2.
        (
            101,
            {"base_lr": 1.0, "warmup_steps": 10, "min_lr": 0.1},
            {1: 0.1, 5: 0.5, 9: 0.9, 10: 1.0, 40: 0.1 + 0.9 * 0.75, 55: 0.55, 70: 0.1 + 0.9 * 0.25, 100: 0.1},
        ),
        (10, HALF, {0: 0.5, 9: 0.1}),
        (1, HALF, {0: 0.5}),
        (10, {"warmup_steps": 9, "base_lr": 0.9}, {8: 0.8}),  # the longest warm-up
    ],
)
def test_golden_values_by_hand(total, options, rates):
    assert {step: lr_at_step(step, total, **options) for step in rates} == pytest.approx(rates, rel=1e-12)


@given(
    total=st.integers(3, 300),
    warmup=st.integers(0, 300),
    base=st.floats(1e-5, 1.0),
    share=st.floats(0.0, 1.0),
)
def test_linear_warm_up_then_cosine_decay(total, warmup, base, share):
    warmup %= total - 1
    low = base * share
    rates = [lr_at_step(s, total, base_lr=base, warmup_steps=warmup, min_lr=low) for s in range(total)]
    for step in range(warmup):
        assert rates[step] == pytest.approx(base * step / warmup)
    assert (rates[warmup], rates[-1]) == (base, low)  # exactly
    for step in range(warmup, total):  # half of a cosine, point-symmetric around its middle
        mirrored = total - 1 - (step - warmup)
        assert rates[step] + rates[mirrored] == pytest.approx(base + low)
        angle = math.pi * (step - warmup) / (total - 1 - warmup)
        assert (rates[step] - low) == pytest.approx((base - low) * math.cos(angle / 2) ** 2, abs=1e-12)


@pytest.mark.parametrize("step", [-1, 10, 11])
def test_a_step_outside_the_run_is_rejected(step):
    with pytest.raises(ValueError, match=rf"9.*{step}"):
        lr_at_step(step, 10, warmup_steps=0)


@pytest.mark.parametrize("warmup", [10, 200])
def test_a_warm_up_as_long_as_the_run_is_rejected(warmup):
    with pytest.raises(ValueError, match=rf"{warmup}.*10"):
        lr_at_step(0, 10, warmup_steps=warmup)
