"""The learning rate of each step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt import lr_at_step


def test_the_three_corners_with_the_defaults():
    assert lr_at_step(0, 2000) == 0.0
    assert lr_at_step(200, 2000) == pytest.approx(3e-4, rel=1e-12)
    assert lr_at_step(1999, 2000) == pytest.approx(3e-5, rel=1e-12)


def test_golden_values_by_hand():
    # warm-up 10, decay over the 90 steps 10..99 from 1 to 0.1
    def lr(step):
        return lr_at_step(step, 101, base_lr=1.0, warmup_steps=10, min_lr=0.1)

    assert lr(1) == pytest.approx(0.1)
    assert lr(5) == pytest.approx(0.5)
    assert lr(9) == pytest.approx(0.9)
    assert lr(10) == pytest.approx(1.0)
    assert lr(40) == pytest.approx(0.1 + 0.9 * 0.75)  # one third: (1 + cos 60°) / 2
    assert lr(55) == pytest.approx(0.55)  # half way
    assert lr(70) == pytest.approx(0.1 + 0.9 * 0.25)
    assert lr(100) == pytest.approx(0.1)


def test_no_warm_up_starts_at_base_lr():
    assert lr_at_step(0, 10, warmup_steps=0, base_lr=0.5, min_lr=0.1) == pytest.approx(0.5, rel=1e-12)
    assert lr_at_step(9, 10, warmup_steps=0, base_lr=0.5, min_lr=0.1) == pytest.approx(0.1, rel=1e-12)


def test_a_run_of_one_step():
    assert lr_at_step(0, 1, warmup_steps=0, base_lr=0.5, min_lr=0.1) == pytest.approx(0.5)


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
    assert rates[warmup] == pytest.approx(base)
    assert rates[-1] == pytest.approx(low, abs=1e-15)
    for step in range(warmup, total):  # half of a cosine, point-symmetric around its middle
        mirrored = total - 1 - (step - warmup)
        assert rates[step] + rates[mirrored] == pytest.approx(base + low)
        angle = math.pi * (step - warmup) / (total - 1 - warmup)
        assert (rates[step] - low) == pytest.approx((base - low) * math.cos(angle / 2) ** 2, abs=1e-12)


@pytest.mark.parametrize("step", [-1, 10, 11])
def test_a_step_outside_the_run_is_rejected(step):
    with pytest.raises(ValueError, match=rf"9.*{step}"):
        lr_at_step(step, 10, warmup_steps=0)


@pytest.mark.parametrize("warmup", [10, 11, 200])
def test_a_warm_up_as_long_as_the_run_is_rejected(warmup):
    with pytest.raises(ValueError, match=rf"{warmup}.*10"):
        lr_at_step(0, 10, warmup_steps=warmup)


def test_the_longest_warm_up_is_allowed():
    assert lr_at_step(8, 10, warmup_steps=9, base_lr=0.9) == pytest.approx(0.8)


def test_the_options_are_keywords():
    with pytest.raises(TypeError):
        lr_at_step(0, 10, 3e-4)


@given(st.floats(1e-6, 1.0), st.floats(0.0, 1.0), st.integers(0, 50), st.integers(2, 100))
def test_both_ends_are_exact(base_lr, share, warmup, rest):
    rates = {"base_lr": base_lr, "min_lr": share * base_lr, "warmup_steps": warmup}
    assert lr_at_step(warmup, warmup + rest, **rates) == base_lr
    assert lr_at_step(warmup + rest - 1, warmup + rest, **rates) == share * base_lr
