"""The learning rate of each step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt import lr_at_step
from niels_gpt.config import TrainConfig
from niels_gpt.training.optim.schedule import ramp_steps, scheduled_lr

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
    with pytest.raises(ValueError, match=rf"{warmup}.*10.*at most 9\b"):
        lr_at_step(0, 10, warmup_steps=warmup)
    assert lr_at_step(0, 10, warmup_steps=9) == 0.0  # as advised


# --- total_steps changes -----------------------------------------------------------------------------

RATES = {"base_lr": 1.0, "min_lr": 0.1, "warmup_steps": 20}


def lrs(**settings):
    train = TrainConfig(**RATES, **settings)
    return [scheduled_lr(step, train) for step in range(train.total_steps)]


def plain(total, step):
    return lr_at_step(step, total, **RATES)


def test_without_a_change_it_is_the_schedule_of_the_specification():
    assert lrs(total_steps=100) == [plain(100, step) for step in range(100)]


def test_a_finished_run_that_is_extended_warms_up_to_the_longer_cosine():
    rates = lrs(total_steps=300, extended=((100, 100),))
    assert rates[:100] == [plain(100, step) for step in range(100)]
    assert rates[99] == pytest.approx(0.1)
    # A ramp of 20 steps (a tenth of the 200 left): step 100 + i is (i + 1) / 21 of the way from 0.1 to the new cosine.
    expected = [0.1 + (plain(300, 100 + i) - 0.1) * (i + 1) / 21 for i in range(20)]
    assert rates[100:120] == pytest.approx(expected)
    assert rates[120:] == [plain(300, step) for step in range(120, 300)]
    assert rates[-1] == pytest.approx(0.1)


def test_a_running_run_is_extended_or_cut_without_a_jump():
    for total in (400, 60):
        rates = lrs(total_steps=total, extended=((50, 100),))
        assert rates[:50] == [plain(100, step) for step in range(50)]
        ramp = (total - 50) // 10
        between = sorted([rates[49], plain(total, 50 + ramp)])
        assert all(between[0] <= rate <= between[1] for rate in rates[50 : 50 + ramp])
        assert rates[50 + ramp :] == [plain(total, step) for step in range(50 + ramp, total)]


def test_later_changes_leave_the_steps_before_them_unchanged():
    first = lrs(total_steps=300, extended=((100, 100),))
    second = lrs(total_steps=500, extended=((100, 100), (150, 300)))
    assert second[:150] == first[:150]
    assert min(first[149], plain(500, 150)) < second[150] < max(first[149], plain(500, 150))
    assert second[185:] == [plain(500, step) for step in range(185, 500)]


def test_a_run_cut_during_its_warm_up_ends_at_the_smallest_rate():
    rates = lrs(total_steps=18, extended=((5, 100),))
    assert rates[:5] == [plain(100, step) for step in range(5)]
    assert rates[-1] == pytest.approx(0.1) and max(rates) <= 1.0
    with pytest.raises(ValueError, match="warm-up of 20 steps"):
        lrs(total_steps=18)


def test_the_ramp_is_a_tenth_of_the_rest_and_at_most_200_steps():
    assert [ramp_steps(100, total) for total in (101, 102, 119, 200, 300, 9000)] == [0, 1, 1, 10, 20, 200]
