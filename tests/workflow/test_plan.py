"""The plan of a chat model: its size, its vocabulary and its steps, by text, machine and time."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from niels_gpt.config.yaml_file import config_from_dict
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.pipeline import PipelineFolder
from niels_gpt.workflow import plan as module
from niels_gpt.workflow.plan import SIZES, Plan, Size, StepTimes, demo_plan, make_plan, measure_steps, plan_in

TINY = Plan(Size(32, 1, 2, 16), 60, 5, 5, pretrain_rows=2, sft_rows=3)


def constant(pretrain: float, sft: float) -> Any:
    """A machine whose steps take the same time for every model."""
    return lambda plan, device: StepTimes(pretrain, sft)


def planned(measure: Any = None, **changes: Any) -> Plan:
    options = {"note_bytes": 3_000_000, "held_out_bytes": 300_000, "characters": 100, "seconds": 600.0, "device": "cpu"}
    return make_plan(**{**options, **changes}, measure=measure or constant(0.1, 0.2))


def test_the_sections_of_a_config() -> None:
    plan = Plan(Size(128, 3, 4, 256), 4004, 100, 700, dropout=0.1, precision="fp32")
    config = config_from_dict({"model": plan.model(), "train": plan.train(100, 8)})
    model, train = config.model, config.train
    assert (model.C, model.L, model.H, model.T, model.V, model.dropout) == (128, 3, 4, 256, 4004, 0.1)
    assert (train.total_steps, train.warmup_steps, train.B, train.optimizer) == (100, 5, 8, "muon")
    assert (train.base_lr, train.min_lr, train.precision) == (0.01, 0.0005, "fp32")
    assert plan.parameters == sum(p.numel() for p in GPT(model).parameters())
    assert dataclasses.replace(plan, vocab_size=0).model()["V"] == 256


def test_wide_models_learn_more_slowly() -> None:
    rates = [dataclasses.replace(TINY, size=size).train(10, 8)["base_lr"] for size in SIZES]
    assert rates == pytest.approx(
        [0.01, 0.01, 0.01 * math.sqrt(2 / 3), 0.01 / math.sqrt(2), 0.01 / math.sqrt(3), 0.005]
    )


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 1), (39, 1), (40, 2), (1000, 50)])
def test_every_number_of_steps_has_a_warm_up(steps: int, warmup: int) -> None:
    assert TINY.train(steps, 8)["warmup_steps"] == warmup


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_a_config_and_the_widths_suit_the_hardware(size: Size) -> None:
    model = config_from_dict({"model": dataclasses.replace(TINY, size=size).model()}).model
    assert model.d_ff % 64 == 0 and 8 * size.C / 3 <= model.d_ff < 8 * size.C / 3 + 64
    assert size.C % size.H == 0


def test_sizes_grow() -> None:
    counts = [dataclasses.replace(TINY, size=size, vocab_size=4004).parameters for size in SIZES]
    assert counts == sorted(set(counts)) and counts[0] < 1e6 < 2e7 < counts[-1]


@pytest.mark.parametrize(("steps", "phases"), [(660, (60, 600)), (7, (1, 6)), (1, (1, 1)), (35, (3, 32))])
def test_the_plan_of_the_demo(steps: int, phases: tuple[int, int]) -> None:
    plan = demo_plan(steps=steps, device="cpu")
    assert (plan.pretrain_steps, plan.sft_steps) == phases
    assert (plan.size, plan.vocab_size) == (Size(128, 2, 4, 256), 4004)


@pytest.mark.parametrize("fast", [False, True])
def test_bf16_where_it_is_fast(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_fast_bf16", lambda device: fast)
    assert {planned().precision, demo_plan(steps=9, device="cpu").precision} == {"bf16" if fast else "fp32"}


@pytest.mark.parametrize(
    ("characters", "vocab_size"), [(1, 4004), (1743, 4004), (1744, 8004), (3743, 8004), (3744, 0), (60_000, 0)]
)
def test_many_characters_need_a_larger_vocabulary_or_bytes(characters: int, vocab_size: int) -> None:
    """Half of the vocabulary is left for pieces of several characters, beside 256 bytes and the unknown piece."""
    assert planned(characters=characters).vocab_size == vocab_size


@pytest.mark.parametrize(
    ("size", "T"), [(198, 32), (389, 32), (390, 64), (773, 64), (774, 128), (1542, 256), (3078, 512)]
)
@pytest.mark.parametrize("scarce", ["note_bytes", "held_out_bytes"])
def test_the_context_fits_the_shorter_half(size: int, T: int, scarce: str) -> None:
    """A window of T tokens and its last target, of up to six bytes each."""
    assert module.longest_context(size) == T
    # A machine so fast that the largest model that may be chosen depends on the text alone.
    tried = []
    planned(lambda plan, device: tried.append(plan.size.T) or StepTimes(0.1, 0.1), **{scarce: size})
    assert tried[0] == min(256, T) and max(tried) <= T


@pytest.mark.parametrize("scarce", ["note_bytes", "held_out_bytes"])
def test_too_little_text(scarce: str) -> None:
    with pytest.raises(ValueError, match=r"197 bytes.*198"):
        planned(**{scarce: 197})


def test_small_vaults_get_dropout() -> None:
    assert [planned(note_bytes=size).dropout for size in (10_000, 1_999_999, 2_000_000)] == [0.1, 0.1, 0.0]


def test_rows_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_fast_bf16", lambda device: False)
    assert planned().pretrain_rows == 8 and planned(device="mps").pretrain_rows == 32


def test_steps_fill_the_time() -> None:
    """A slow machine: all but 30 seconds and a report of a minute for training, 45 % of that for fine-tuning."""
    plan = planned(constant(1.0, 1.0), seconds=390.0)
    assert (plan.sft_steps, plan.pretrain_steps, plan.seconds) == (135, 165, 300.0)
    assert planned(constant(1.0, 3.0), seconds=390.0).sft_steps == 45
    assert planned(constant(2.0, 3.0), seconds=390.0).pretrain_steps == (300 - 45 * 3) // 2
    assert planned(constant(0.1, 0.1), seconds=100.0).seconds == pytest.approx(50.0)  # a report of 20 seconds
    assert planned(constant(0.1, 0.1), seconds=60.0).seconds == pytest.approx(24.0, abs=0.2)  # at least 40 %


def test_steps_are_limited_by_the_text() -> None:
    """A fast machine: 2,000 steps of fine-tuning, and ten passes over the notes at 3.5 bytes a token."""
    plan = planned(constant(1e-3, 1e-3), note_bytes=350_000)
    assert plan.sft_steps == 2000
    assert plan.pretrain_steps == int(10 * 350_000 / 3.5 / (8 * plan.size.T))
    assert plan.seconds == pytest.approx((2000 + plan.pretrain_steps) * 1e-3)


def test_there_are_some_steps_in_no_time() -> None:
    plan = planned(constant(10.0, 10.0), seconds=1.0)
    assert (plan.pretrain_steps, plan.sft_steps, plan.seconds) == (20, 20, 400.0)
    assert planned(constant(1e-3, 1e-3), note_bytes=5_000, held_out_bytes=5_000).pretrain_steps == 20


def test_bytes_are_trained_in_one_phase() -> None:
    slow = planned(constant(1.0, 9.0), characters=9_999, seconds=390.0)
    assert (slow.vocab_size, slow.pretrain_steps, slow.sft_steps, slow.seconds) == (0, 300, 0, 300.0)
    fast = planned(constant(1e-3, 9.0), characters=9_999, note_bytes=400_000)
    assert fast.pretrain_steps == 2 * int(10 * 400_000 / (8 * fast.size.T))  # twice: half of the rows are dialogues
    assert planned(constant(10.0, 9.0), characters=9_999, seconds=1.0).pretrain_steps == 20


def test_the_largest_model_that_sees_enough_text() -> None:
    """Where steps take a time in proportion to the width and depth of the model."""

    def measure(plan: Plan, device: str) -> StepTimes:
        assert device == "cpu"
        C, L, _, T = plan.size
        return StepTimes(1e-10 * C * C * L * T, 1e-10 * C * C * L * T)

    chosen = [planned(measure, seconds=seconds, note_bytes=10**9) for seconds in (1.0, 60.0, 100_000.0)]
    sizes = [SIZES.index(plan.size) for plan in chosen]
    assert sizes[0] == 0 < sizes[1] < sizes[2] == len(SIZES) - 1
    for plan in chosen[1:]:
        assert plan.pretrain_steps * 8 * plan.size.T >= 6 * plan.parameters
    # Few notes make a small model, however long it trains.
    assert planned(measure, seconds=100_000.0, note_bytes=100_000).size == SIZES[0]


@pytest.mark.parametrize(("enough", "index"), [(True, 1), (False, 0)])
def test_six_tokens_a_weight(enough: bool, index: int) -> None:
    weights = dataclasses.replace(TINY, size=SIZES[1], vocab_size=4004).parameters
    steps = math.ceil(6 * weights / (8 * 256)) - (not enough)

    def measure(plan: Plan, device: str) -> StepTimes:
        """Fine-tuning takes no time; pretraining gets the rest, too little for the third size."""
        return StepTimes(1.0 if plan.size in SIZES[:2] else 1e9, 1e-9)

    plan = planned(measure, seconds=steps + 0.5 + 90, note_bytes=10**9)
    assert plan.pretrain_steps == steps and plan.size == SIZES[index]


@pytest.mark.parametrize("vocab_size", [60, 0])
def test_steps_are_measured_on_batches_of_both_phases(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = []

    def seconds(config: Any, batch: Any, device: str, steps: int) -> float:
        batches.append(batch)
        assert (config.model.V, device, steps) == (vocab_size or 256, "cpu", 3)
        return float(len(batches))

    monkeypatch.setattr(module, "_seconds_per_step", seconds)
    size = Size(32, 1, 2, 96)
    times = measure_steps(dataclasses.replace(TINY, size=size, vocab_size=vocab_size), "cpu")
    assert times == ((1.0, 2.0) if vocab_size else (1.0, 1.0))
    assert [tuple(batch.x.shape) for batch in batches] == [(2, 96), (3, 64)][: len(batches)]
    assert [int((batch.targets != -100).sum()) for batch in batches] == [2 * 96, 3 * 32][: len(batches)]
    if vocab_size:  # the answer follows the question
        assert (batches[1].targets[:, :32] == -100).all()


def test_a_measurement() -> None:
    assert all(0 < seconds < 60 for seconds in measure_steps(TINY, "cpu", steps=1))


def test_the_first_step_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 100.0, 100.0, 100.3, 100.3, 100.4, 100.4, 100.6])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    assert measure_steps(dataclasses.replace(TINY, vocab_size=0), "cpu") == pytest.approx((0.2, 0.2))


def test_slow_steps_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 9.0, 9.0, 17.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    assert measure_steps(dataclasses.replace(TINY, vocab_size=0), "cpu") == (8.0, 8.0)


def test_evaluations_take_a_tenth_of_the_time() -> None:
    """A forward pass takes a third of a step; the evaluation after fine-tuning reads 48 rows of notes, too."""
    fast = planned(constant(1e-3, 1e-3))
    assert (fast.evaluations, fast.eval_steps, fast.sft_eval_steps) == (8, 10, 10)
    for seconds in (100.0, 200.0, 390.0):
        slow = planned(constant(1.0, 1.0), seconds=seconds)
        assert slow.evaluations >= 2
        assert 0.05 <= slow.evaluations * slow.eval_steps / 3 / slow.pretrain_steps <= 0.12
        assert slow.sft_eval_steps == max(int(0.1 * slow.sft_steps / ((2 + 48 / 8) / 3)), 1)
    assert planned(constant(1.0, 9.0), characters=9_999, seconds=190.0).eval_steps < 10  # bytes


def test_no_more_dialogues_than_rows() -> None:
    plan = planned(constant(1.0, 1.0), seconds=100.0)
    assert plan.most_dialogues == plan.sft_steps * plan.sft_rows == 22 * 48


@pytest.mark.parametrize("vocab_size", [4004, 0])
def test_the_plan_behind_its_configs(vocab_size: int) -> None:
    plan = Plan(Size(128, 3, 4, 256), vocab_size, 100, 70 if vocab_size else 0, 8, 48 if vocab_size else 0, 0.1, "bf16")
    data = {"roam_split": plan.split_by}
    pretrain, sft = (
        config_from_dict({"model": plan.model(), "train": plan.train(*phase), "data": data}) if phase[0] else None
        for phase in ((100, 8), (plan.sft_steps, plan.sft_rows))
    )
    assert pretrain is not None and Plan.of(pretrain, sft) == plan


def test_the_plan_in_a_folder(tmp_path: Path) -> None:
    folder = PipelineFolder(tmp_path / "pipeline")
    assert plan_in(folder) is None
    folder.path.mkdir()
    configs = {
        name: config_from_dict({"model": TINY.model(), "train": TINY.train(steps, 2)})
        for name, steps in (("pretrain", 5), ("sft", 7))
    }
    folder.write_configs(configs)
    found = plan_in(folder)
    assert found is not None and (found.size, found.pretrain_steps, found.sft_steps) == (TINY.size, 5, 7)
    (tmp_path / "bytes").mkdir()
    RunFolder(tmp_path / "bytes").write_config(configs["pretrain"])
    found = plan_in(PipelineFolder(tmp_path / "bytes"))
    assert found is not None and (found.pretrain_steps, found.sft_steps, found.vocab_size) == (5, 0, 0)
