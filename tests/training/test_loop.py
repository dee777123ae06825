import contextlib
import json
import math
import os
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

from niels_gpt.config.yaml_file import load_config
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import CheckpointError, load_model
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system.rng import derive_seed
from niels_gpt.training import loop
from niels_gpt.training.loop import DeviceFailed, TrainingDiverged, train
from niels_gpt.training.progress import Silent
from niels_gpt.training.tasks.byte_task import ByteTask
from niels_gpt.training.tasks.registry import open_task
from tests.training import data_options, metric_lines, same, small_config, weights_sha256, write_texts

CONFIGS = Path(__file__).parents[2] / "configs"


class Spy(Silent):
    """Calls `at_step` with the number of updates done, after each; keeps the notes."""

    def __init__(self, at_step=lambda done: None):
        self.at_step, self.notes, self.closed = at_step, [], False

    def step(self, line):
        self.at_step(line["step"] + 1)

    def note(self, text):
        self.notes.append(text)

    def close(self):
        self.closed = True


class Crash(Exception):
    """Stands for a kill: nothing catches it."""


def crash_at(step):
    def at_step(done):
        if done == step:
            raise Crash

    return Spy(at_step)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "data")


@pytest.fixture(scope="module")
def whole(texts, tmp_path_factory):
    """An uninterrupted run."""
    run = RunFolder(tmp_path_factory.mktemp("whole") / "run")
    result = train(small_config(texts), run)
    assert (result.step, result.stopped_by) == (12, None)
    return run


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


def losses(run):
    return [line["loss"] for line in metric_lines(run.path)]


def content(path):
    return torch.load(path, weights_only=True)


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- what is trained ---------------------------------------------------------------------------------


GOLDEN = {
    "adamw": [
        5.53909,
        5.08322,
        4.84219,
        4.61333,
        4.36921,
        4.34642,
        3.9965,
        3.82652,
        3.67351,
        3.51689,
        3.35931,
        3.27184,
    ],
    "muon": [5.53909, 5.30721, 5.01565, 4.72186, 4.46435, 4.22147, 3.99154, 3.7874, 3.6083, 3.44204, 3.28212, 3.20529],
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_golden_losses(texts, run, optimizer):
    """A change that should not change training must not change these (configs/debug.yaml, on fixed text)."""
    changes = ["train.p_train={roam: 0.5, primer: 0.5}", "train.p_val={roam: 0.5, primer: 0.5}"]
    changes += ["output.checkpoint_every=100", f"train.optimizer={optimizer}"]
    config = load_config(CONFIGS / "debug.yaml", overrides=[*changes, *data_options(texts)])
    with pytest.raises(Crash):
        train(config, run, report=crash_at(12))
    assert losses(run) == pytest.approx(GOLDEN[optimizer], rel=1e-3)


def test_every_update_is_that_of_a_naive_loop(texts, run):
    """Batches, schedule, clipping, decay and order, in fifteen lines of plain torch."""
    config = small_config(texts, "model.dropout=0.0", "train.clip_norm=0.5", "train.weight_decay=0.5")
    train(config, run)
    task = open_task(config)
    torch.manual_seed(derive_seed(7, "init"))
    model = GPT(config.model)
    decayed = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)
    for step, line in enumerate(metric_lines(run.path)):
        done = (step - 2) / 9
        lr = 1e-2 * step / 2 if step < 2 else 1e-3 + 9e-3 * (1 + math.cos(math.pi * done)) / 2
        x, y, *_ = task.batch(step)
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1.0, 0.5 / norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        assert line["step"] == step
        assert line["lr"] == pytest.approx(lr)
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert step == 11
    for name, weight in content(run.latest)["model"].items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=1e-3, atol=1e-5)


def test_bf16_multiplies_in_bf16_and_keeps_the_rest(texts, tmp_path, monkeypatch):
    seen = {"linear": set(), "attention": set()}
    linear, attention = torch.nn.functional.linear, torch.nn.functional.scaled_dot_product_attention

    def watch_linear(x, *rest):
        y = linear(x, *rest)
        seen["linear"].add((y.dtype, torch.is_grad_enabled()))
        return y

    def watch_attention(q, *rest, **options):
        seen["attention"].add(q.dtype)
        return attention(q, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "linear", watch_linear)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch_attention)
    half, full = RunFolder(tmp_path / "half"), RunFolder(tmp_path / "full")
    train(small_config(texts, "train.precision=bf16"), half)
    assert seen["linear"] == {(torch.bfloat16, True), (torch.float32, False)}  # training, evaluation
    assert seen["attention"] == {torch.float32}
    train(small_config(texts), full)
    assert losses(half) != losses(full)
    assert losses(half) == pytest.approx(losses(full), rel=0.01)
    assert {w.dtype for w in content(half.latest)["model"].values()} == {torch.float32}


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_gives_the_same_losses(texts, tmp_path, parts):
    plain, split = RunFolder(tmp_path / "plain"), RunFolder(tmp_path / "split")
    train(small_config(texts, "model.dropout=0.0"), plain)
    train(small_config(texts, "model.dropout=0.0", f"train.accumulate={parts}"), split)
    assert losses(split) == pytest.approx(losses(plain), abs=1e-5)
    old, new = (content(run.latest)["model"] for run in (plain, split))
    for name in old:
        torch.testing.assert_close(new[name], old[name], rtol=1e-3, atol=1e-5)


def test_accumulation_runs_smaller_forward_passes(texts, run, monkeypatch):
    sizes = []
    forward = GPT.forward

    def spy(self, x, **options):
        if self.training:
            sizes.append(len(x))
        return forward(self, x, **options)

    monkeypatch.setattr(GPT, "forward", spy)
    train(small_config(texts, "train.accumulate=4"), run)
    assert sizes == [1] * 4 * 12


def test_masked_targets_count_once_each_however_the_batch_is_split(texts, tmp_path):
    """Parts with different numbers of targets: the mean is over targets, not over parts."""

    class Masked(ByteTask):
        def batch(self, step):
            x, targets, *_ = super().batch(step)
            targets = targets.clone()
            targets[0, 1:] = -100
            targets[1, :8] = -100
            return type(super().batch(step))(x, targets)

    results = []
    for parts in (1, 4):
        config = small_config(texts, "model.dropout=0.0", f"train.accumulate={parts}")
        run = RunFolder(tmp_path / str(parts))
        train(config, run, task=Masked(config, open_task(config).streams))
        results.append(losses(run))
    assert results[1] == pytest.approx(results[0], abs=1e-5)


def test_seeds(texts, whole, tmp_path):
    again, other = RunFolder(tmp_path / "again"), RunFolder(tmp_path / "other")
    torch.manual_seed(12345)  # whatever the state of the process
    train(small_config(texts), again)
    assert losses(again) == losses(whole)
    assert weights_sha256(again.latest) == weights_sha256(whole.latest)
    train(small_config(texts, "train.seed=8"), other)
    assert losses(other) != losses(whole)


def test_dropout_is_on_in_training_and_another_every_step(texts, whole, run, monkeypatch):
    train(small_config(texts, "model.dropout=0.0"), run)
    assert losses(run) != losses(whole)
    masks = []
    from niels_gpt.model import dropout

    drawn = dropout.keep_mask

    def spy(*args, **options):
        masks.append(drawn(*args, **options))
        return masks[-1]

    monkeypatch.setattr(dropout, "keep_mask", spy)
    train(small_config(texts, "train.total_steps=3"), RunFolder(run.path.with_name("spied")))
    assert len(masks) == 3 * 3
    assert len({mask.numpy().tobytes() for mask in masks}) == 9


def test_output_settings_do_not_touch_the_weights(texts, whole, run):
    habits = ["output.checkpoint_every=1", "output.eval_every=1", "output.sample_every=2", "output.keep=1"]
    train(small_config(texts, *habits), run)
    assert losses(run) == losses(whole)
    assert weights_sha256(run.latest) == weights_sha256(whole.latest)


# --- what is left behind -----------------------------------------------------------------------------


def test_the_folder_of_a_run(texts, whole):
    found = sorted(str(path.relative_to(whole.path)) for path in whole.path.rglob("*") if path.is_file())
    assert found == [
        "checkpoints/best.pt",
        "checkpoints/config.json",
        "checkpoints/latest.pt",
        "checkpoints/step_00000004.pt",
        "checkpoints/step_00000008.pt",
        "checkpoints/step_00000012.pt",
        "config.yaml",
        "metrics.jsonl",
        "run.lock",
        "samples/step_00000012.txt",
    ]
    assert whole.read_config() == small_config(texts)
    lines = metric_lines(whole.path)
    assert [line["step"] for line in lines] == list(range(12))
    assert [line["step"] + 1 for line in lines if "evals" in line] == [3, 6, 9, 12]
    assert all(set(line["evals"]) == {"val_roam", "val_chat"} for line in lines if "evals" in line)
    assert json.loads((whole.checkpoints / "config.json").read_text(encoding="utf-8"))["C"] == 16


def test_samples_continue_the_prompt(texts, run):
    train(small_config(texts, "output.sample_every=5", "output.sample_prompt=hello", "output.sample_tokens=9"), run)
    samples = {path.name: path.read_text(encoding="utf-8") for path in run.samples.iterdir()}
    assert sorted(samples) == ["step_00000005.txt", "step_00000010.txt", "step_00000012.txt"]
    assert all(text.startswith("hello") and len(text) > len("hello\n") for text in samples.values())


def test_a_checkpoint_of_step_s_holds_the_weights_after_s_updates(texts, whole, run):
    with pytest.raises(Crash):
        train(small_config(texts, "output.checkpoint_every=1"), run, report=crash_at(9))
    assert content(run.latest)["step"] == 8
    assert weights_sha256(run.latest) == weights_sha256(whole.step_path(8))


class Scripted(ByteTask):
    """Validation losses from a list."""

    def __init__(self, config, values):
        super().__init__(config, open_task(config).streams)
        self.values = iter(values)

    def evaluate(self, model, device):
        value = next(self.values)
        return {"val_wiki": value}, value


@pytest.mark.parametrize(
    ("values", "best"),
    [([4, 3, 2, 1], 12), ([1, 2, 3, 4], 3), ([3, 1, 2, 1.5], 6), ([2, 2, 2, 2], 3), ([5, 4, 3.5, 3.9], 9)],
)
def test_the_best_checkpoint_has_the_lowest_validation_loss(texts, run, values, best):
    config = small_config(texts, "output.keep=1")
    result = train(config, run, task=Scripted(config, values))
    assert content(run.best)["step"] == best
    assert content(run.latest)["step"] == 12
    assert result.best == {"step": best, "loss": min(values)}
    assert load_model(run.best)[1] == best


def test_the_best_is_weighted_by_p_val(texts, run):
    config = small_config(texts, "train.p_val={roam: 0.9, primer: 0.1}", "output.eval_every=1", "train.base_lr=0.3")
    result = train(config, run)
    values = {
        line["step"] + 1: 0.9 * line["evals"]["val_roam"] + 0.1 * line["evals"]["val_chat"]
        for line in metric_lines(run.path)
    }
    lowest = min(values, key=values.get)
    assert content(run.best)["step"] == lowest
    assert result.best["loss"] == pytest.approx(values[lowest])
    model, _ = load_model(run.best)
    assert open_task(config).evaluate(model, "cpu")[1] == pytest.approx(values[lowest], rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_validation_loss_that_is_no_number_is_never_the_best(texts, run, bad):
    """Whether the run stops there or goes on: the checkpoint people use is one that works."""
    config = small_config(texts)
    with contextlib.suppress(TrainingDiverged):
        train(config, run, task=Scripted(config, [bad, 3.0, 2.0, 4.0]))
    assert not run.best.exists() or content(run.best)["step"] == 9


def test_the_reporter_is_closed_whatever_happens(texts, run):
    reporter = crash_at(2)
    with pytest.raises(Crash):
        train(small_config(texts), run, report=reporter)
    assert reporter.closed


def test_no_new_run_where_one_has_lost_its_config(texts, run):
    train(small_config(texts), run)
    run.config_path.unlink()
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"holds checkpoints/best\.pt of a run without its config\.yaml: bring"):
        train(small_config(texts), run)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_weights_to_begin_with_are_looked_for_before_the_data(texts, run, monkeypatch):
    monkeypatch.setattr(loop, "open_task", pytest.fail)
    with pytest.raises(ValueError, match=r"^init_from: no checkpoint nowhere\.pt$"):
        train(small_config(texts, "init_from=nowhere.pt"), run)


# --- a device that gives up --------------------------------------------------------------------------


def failing_at(step, monkeypatch):
    update = loop.StepRunner.step

    def fails(self, batch, *, step, lr):
        if step == fails.step:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nand a page of advice")
        return update(self, batch, step=step, lr=lr)

    fails.step = step
    monkeypatch.setattr(loop.StepRunner, "update", fails)


def test_a_device_that_fails_costs_what_was_not_saved(texts, run, whole, monkeypatch):
    config = small_config(texts)
    failing_at(10, monkeypatch)
    with pytest.raises(DeviceFailed) as err:
        train(config, run)
    saved = run.step_path(8)
    said = "cpu failed after 10 updates (CUDA error: unspecified launch failure)"
    assert str(err.value) == f"{said}: go on from {saved} with --resume"
    assert err.value.leave_at_once
    monkeypatch.undo()
    assert train(config, run, resume=True).step == 12
    assert weights_sha256(run.latest) == weights_sha256(whole.latest)


def test_a_device_that_fails_at_once_leaves_the_folder_free(texts, run, monkeypatch):
    failing_at(0, monkeypatch)
    with pytest.raises(DeviceFailed, match=r"failed after 0 updates .* nothing had been saved yet"):
        train(small_config(texts), run)
    monkeypatch.undo()
    assert train(small_config(texts), run).step == 12


# --- divergence --------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_stops_the_run(texts, run):
    with pytest.raises(TrainingDiverged, match=r"step 1\b.*no checkpoint"):
        train(small_config(texts, "train.base_lr=1e30", "train.warmup_steps=0"), run)
    assert losses(run)[0] == pytest.approx(math.log(256), abs=0.3)
    assert len(losses(run)) == 1
    for line in run.metrics_path.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)


class Poisoned(ByteTask):
    """From a step on, the model it is asked about has a broken weight."""

    def __init__(self, config, step, model_of):
        super().__init__(config, open_task(config).streams)
        self.step, self.model_of = step, model_of

    def batch(self, step):
        if step == self.step:
            with torch.no_grad():
                self.model_of().norm.weight[0] = math.inf
        return super().batch(step)


def test_the_step_and_the_last_good_checkpoint_are_named(texts, run, whole, monkeypatch):
    made = []
    start = loop._start
    monkeypatch.setattr(loop, "_start", lambda *args: made.append(start(*args)) or made[-1])
    config = small_config(texts)
    with pytest.raises(TrainingDiverged) as err:
        train(config, run, task=Poisoned(config, 10, lambda: made[-1].model))
    assert "step 10" in str(err.value)
    assert str(run.step_path(8)) in str(err.value)
    assert content(run.latest)["step"] == 8
    assert weights_sha256(run.latest) == weights_sha256(whole.step_path(8))
    assert len(losses(run)) == 10
    monkeypatch.undo()
    assert train(config, run, resume=True).step == 12  # and from there it goes on
    assert weights_sha256(run.latest) == weights_sha256(whole.latest)


def test_what_is_said_of_a_run_that_broke_makes_it_go_on(texts, run):
    """Also where what was saved last is broken already."""
    often = ("output.checkpoint_every=1", "output.eval_every=100")
    with pytest.raises(TrainingDiverged, match=r"step_00000001\.pt\. Try .*--resume --allow-config-change"):
        train(small_config(texts, "train.base_lr=1e33", "train.warmup_steps=1", *often), run)
    assert content(run.latest)["step"] == 1
    lower = small_config(texts, "train.base_lr=1e-3", "train.warmup_steps=1", *often)
    assert train(lower, run, resume=True, allow_config_change=True).step == 12
    assert all(math.isfinite(loss) for loss in losses(run))


def test_a_run_that_broke_before_all_checkpoints_begins_again(texts, run):
    with pytest.raises(TrainingDiverged, match=r"no checkpoint from before.*--resume --allow-config-change"):
        train(small_config(texts, "train.base_lr=1e30", "train.warmup_steps=0"), run)
    lower = small_config(texts, "train.base_lr=1e-3", "train.warmup_steps=0")
    assert train(lower, run, resume=True, allow_config_change=True).step == 12
    assert [line["step"] for line in run.metrics()] == list(range(12))


def test_a_checkpoint_before_a_bad_validation_is_good(texts, run):
    config = small_config(texts, "output.checkpoint_every=5")
    with pytest.raises(TrainingDiverged, match=r"step_00000005\.pt"):
        train(config, run, task=Scripted(config, [3.0, math.nan]))
    assert content(run.latest)["step"] == 5


def test_the_checkpoint_that_is_called_good_is_good(texts, run):
    """A warm-up of 1e33 breaks the weights at step 1, and checkpoints are written at every step."""
    config = small_config(
        texts, "train.base_lr=1e33", "train.warmup_steps=1", "output.checkpoint_every=1", "output.eval_every=100"
    )
    with pytest.raises(TrainingDiverged, match=r"step 2\b") as err:
        train(config, run)
    named = [path for path in run.checkpoints.iterdir() if str(path) in str(err.value)]
    assert len(named) == 1
    model, _ = load_model(named[0])
    assert math.isfinite(open_task(config).evaluate(model, "cpu")[1])


def test_a_run_whose_last_update_breaks_it_does_not_end_well(texts, run):
    """The loss that follows the last update is the validation loss."""
    with pytest.raises(TrainingDiverged):
        train(small_config(texts, "train.base_lr=1e30", "train.warmup_steps=0", "train.total_steps=1"), run)


# --- resume ------------------------------------------------------------------------------------------


def check_same(run, whole):
    assert metric_lines(run.path) == metric_lines(whole.path)
    for name in ("latest", "best"):
        old, new = content(getattr(whole, name)), content(getattr(run, name))
        assert same(new, old), name
    assert [path.name for path in run.step_files()] == [path.name for path in whole.step_files()]
    for path in whole.samples.iterdir():
        assert (run.samples / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("step", range(1, 13))
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(texts, whole, run, step):
    with pytest.raises(Crash):
        train(small_config(texts), run, report=crash_at(step))
    torch.manual_seed(step)
    reporter = Spy()
    result = train(small_config(texts), run, resume=True, report=reporter)
    assert result.step == 12
    begun = (step - 1) // 4 * 4
    assert any(f"step {begun}" in note for note in reporter.notes)
    check_same(run, whole)
    assert result.best == content(whole.latest)["extra"]["best"]


@pytest.mark.parametrize(
    "option", ["train.optimizer=muon", "train.accumulate=2", "output.keep=1", "train.precision=bf16"]
)
def test_that_holds_for_other_settings(texts, tmp_path, option):
    config = small_config(texts, option)
    whole, run = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "run")
    train(config, whole)
    for step in (6, 7, 11):  # three times in one run
        with pytest.raises(Crash):
            train(config, run, resume=run.exists, report=crash_at(step))
    train(config, run, resume=True)
    check_same(run, whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("step", [1, 4, 6])
def test_a_signal_saves_at_once(texts, whole, run, number, step):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    reporter = Spy(lambda done: os.kill(os.getpid(), number) if done == step else None)
    result = train(small_config(texts), run, report=reporter)
    assert result.stopped_by == number.name
    assert result.step in (step, step + 1)  # it comes in the middle of an update, or just after
    assert content(run.latest)["step"] == result.step
    assert len(losses(run)) == result.step
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    result = train(small_config(texts), run, resume=True)
    assert (result.step, result.stopped_by) == (12, None)
    assert metric_lines(run.path) == metric_lines(whole.path)
    assert same(content(run.latest), content(whole.latest))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_so(texts, run, number):
    """nohup ignores SIGHUP, and a shell the SIGINT of what runs in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        reporter = Spy(lambda done: os.kill(os.getpid(), number))
        result = train(small_config(texts, "train.total_steps=3"), run, report=reporter)
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert (result.step, result.signal) == (3, None)


def test_a_signal_at_the_last_update_is_no_stop(texts, whole, run):
    reporter = Spy(lambda done: os.kill(os.getpid(), signal.SIGTERM) if done == 12 else None)
    result = train(small_config(texts), run, report=reporter)
    assert (result.step, result.stopped_by) == (12, None)
    check_same(run, whole)


def test_a_second_ctrl_c_interrupts(texts, run):
    def twice(done):
        if done == 6:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(small_config(texts), run, report=Spy(twice))
    assert content(run.latest)["step"] == 4
    assert train(small_config(texts), run, resume=True).step == 12


def test_it_trains_in_a_thread_too(texts, whole, run):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(small_config(texts), run)))
    thread.start()
    thread.join()
    assert results[0].step == 12
    check_same(run, whole)


def test_resuming_a_finished_run_changes_nothing(texts, whole, run):
    shutil.copytree(whole.path, run.path)
    result = train(small_config(texts), run, resume=True)
    assert result.step == 12
    assert result.best == content(whole.latest)["extra"]["best"]
    check_same(run, whole)


def test_a_damaged_latest_goes_back_to_the_one_before(texts, whole, run):
    shutil.copytree(whole.path, run.path)
    for path in (run.latest, run.step_path(12)):
        with path.open("r+b") as file:
            file.truncate(1000)
    reporter = Spy()
    train(small_config(texts), run, resume=True, report=reporter)
    assert any("latest.pt" in note and "damaged" in note for note in reporter.notes)
    assert any("step 8" in note for note in reporter.notes)
    check_same(run, whole)


def test_nothing_but_damaged_checkpoints(texts, whole, run):
    shutil.copytree(whole.path, run.path)
    for path in (run.latest, *run.step_files()):
        path.write_bytes(b"no checkpoint")
    before = snapshot(run.path)
    with pytest.raises(CheckpointError, match=r"latest\.pt"):
        train(small_config(texts), run, resume=True)
    assert snapshot(run.path) == before


# --- refusals ----------------------------------------------------------------------------------------


@pytest.fixture
def half(texts, run):
    """A run that was cut off after its second checkpoint."""
    with pytest.raises(Crash):
        train(small_config(texts), run, report=crash_at(10))
    return run


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("train.base_lr=0.5", r"train\.base_lr was 0\.01, is 0\.5.*--allow-config-change"),
        ("train.total_steps=20", r"train\.total_steps was 12, is 20.*--allow-config-change"),
        ("train.seed=8", r"train\.seed was 7, is 8"),
        ("train.p_train={roam: 0.5, primer: 0.5}", r"train\.p_train"),
        ("train.optimizer=muon", r"train\.optimizer was 'adamw', is 'muon'"),
        ("train.precision=bf16", r"train\.precision was 'fp32', is 'bf16'"),
        ("model.C=32", r"model\.C was 16, is 32.*new run"),
        ("model.dropout=0.0", r"model\.dropout was 0\.1, is 0\.0"),
    ],
)
def test_resume_with_another_config_is_refused(texts, half, change, named):
    before = snapshot(half.path)
    with pytest.raises(ValueError, match=named):
        train(small_config(texts, change), half, resume=True)
    assert snapshot(half.path) == before
    assert train(small_config(texts), half, resume=True).step == 12


def test_a_checkpoint_from_before_an_option_existed_is_that_of_its_default(texts, whole, half):
    for path in half.step_files():
        saved = content(path)
        del saved["extra"]["config"]["train"]["precision"]
        torch.save(saved, path)
    with pytest.raises(ValueError, match=r"train\.precision was 'fp32', is 'bf16'"):
        train(small_config(texts, "train.precision=bf16"), half, resume=True)
    train(small_config(texts), half, resume=True)
    check_same(half, whole)


def test_habits_of_output_may_change(texts, whole, half):
    train(small_config(texts, "output.checkpoint_every=5", "output.eval_every=2"), half, resume=True)
    assert losses(half) == losses(whole)


def test_another_config_if_asked_for(texts, half):
    result = train(small_config(texts, "train.total_steps=14"), half, resume=True, allow_config_change=True)
    assert result.step == 14
    assert half.read_config().train.total_steps == 14
    assert [line["step"] for line in metric_lines(half.path)] == list(range(14))


@pytest.mark.parametrize("change", ["train.base_lr=0.5", "train.weight_decay=5.0", "train.betas=[0.1, 0.2]"])
def test_a_change_that_was_asked_for_has_its_effect(texts, whole, half, change):
    train(small_config(texts, change), half, resume=True, allow_config_change=True)
    assert weights_sha256(half.latest) != weights_sha256(whole.latest)


def test_another_optimizer_cannot_take_over_the_state(texts, half):
    """Refused in words, or begun anew: but no KeyError."""
    with contextlib.suppress(ValueError):
        result = train(small_config(texts, "train.optimizer=muon"), half, resume=True, allow_config_change=True)
        assert result.step == 12


@pytest.mark.parametrize("change", ["model.C=32", "model.L=2", "model.dropout=0.0"])
def test_another_model_is_refused_even_then(texts, half, change):
    with pytest.raises(ValueError, match=change.split("=")[0]):
        train(small_config(texts, change), half, resume=True, allow_config_change=True)


def test_other_data_is_refused_unless_asked_for(tmp_path, run):
    texts = write_texts(tmp_path / "data")
    with pytest.raises(Crash):
        train(small_config(texts), run, report=crash_at(6))
    primer = texts / "primer.txt"
    original = primer.read_text(encoding="utf-8")
    primer.write_text(original.replace("the", "THE"), encoding="utf-8")
    before = snapshot(run.path)
    with pytest.raises(ValueError, match=r"data has changed.*: primer;.*--allow-data-change"):
        train(small_config(texts), run, resume=True)
    assert snapshot(run.path) == before
    assert train(small_config(texts), run, resume=True, allow_data_change=True).step == 12


def test_data_that_came_back_is_the_same_data(tmp_path, run, texts, whole):
    mine = write_texts(tmp_path / "data")
    with pytest.raises(Crash):
        train(small_config(mine), run, report=crash_at(6))
    shutil.rmtree(mine)
    train(small_config(write_texts(tmp_path / "data")), run, resume=True)
    assert metric_lines(run.path) == metric_lines(whole.path)


def test_nothing_to_resume(texts, run):
    with pytest.raises(ValueError, match="nothing to resume"):
        train(small_config(texts), run, resume=True)
    assert not run.path.exists()


def test_a_folder_that_holds_a_run_is_not_overwritten(texts, half):
    before = snapshot(half.path)
    with pytest.raises(ValueError, match=r"holds a run already.*--resume"):
        train(small_config(texts), half)
    assert snapshot(half.path) == before


def test_a_run_that_came_while_the_data_was_read_is_not_overwritten(texts, run, monkeypatch):
    """Two started at once; the first is done before the second has its streams."""
    config = small_config(texts)

    def slow(config):
        monkeypatch.undo()
        train(config, RunFolder(run.path))
        return open_task(config)

    monkeypatch.setattr(loop, "open_task", slow)
    with pytest.raises(ValueError, match="holds a run already"):
        train(config, run)
    assert len(losses(run)) == 12


@pytest.mark.parametrize("resume", [False, True])
def test_two_at_the_same_time(texts, half, tmp_path, resume):
    folder = half if resume else RunFolder(tmp_path / "new")
    with RunFolder(folder.path).lock(), pytest.raises(ValueError, match="another process"):
        train(small_config(texts), folder, resume=resume)
    assert train(small_config(texts), folder, resume=resume).step == 12


def test_a_warm_up_that_does_not_fit_is_refused_before_anything_is_written(texts, run):
    with pytest.raises(ValueError, match="warm-up of 12"):
        train(small_config(texts, "train.warmup_steps=12"), run)
    assert not run.path.exists()


@pytest.mark.parametrize("deeper", [False, True])
def test_a_file_where_the_folder_should_be(texts, tmp_path, deeper):
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match=r"file is a file.*another --run-dir"):
        train(small_config(texts), RunFolder(file / "run" if deeper else file))
    assert file.read_text(encoding="utf-8") == "mine"


# --- memory ------------------------------------------------------------------------------------------


def no_room(*args, **options):
    """What torch raises on a CPU where there is no memory."""
    return torch.empty(2**50)


def test_a_model_too_large_is_refused_before_the_folder_is_made(texts, run):
    with pytest.raises(ValueError, match=r"[\d,]+ weights \([\d,]+ GiB\)"):
        train(small_config(texts, "model.d_ff=1000000000000"), run)
    assert not run.path.exists()


def test_a_model_that_cannot_be_built_is_told_with_its_size(texts, run, monkeypatch):
    monkeypatch.setattr(loop, "GPT", no_room)
    with pytest.raises(ValueError, match=r"model of 7,216 weights \(0\.00 GiB\) on cpu"):
        train(small_config(texts), run)
    assert not run.exists


@pytest.mark.parametrize("where", ["loss", "batch"])
def test_a_first_update_that_does_not_fit_leaves_the_folder_free(texts, whole, run, monkeypatch, where):
    monkeypatch.setattr(*((GPT, "loss") if where == "loss" else (ByteTask, "batch")), no_room)
    with pytest.raises(ValueError, match="not even one row" if where == "loss" else "batch of 4 rows"):
        train(small_config(texts), run)
    assert not run.exists
    monkeypatch.undo()
    train(small_config(texts), run)
    check_same(run, whole)


def test_a_run_that_goes_on_keeps_its_folder(texts, whole, half, monkeypatch):
    monkeypatch.setattr(GPT, "loss", no_room)
    with pytest.raises(ValueError, match="not even one row"):
        train(small_config(texts), half, resume=True)
    monkeypatch.undo()
    train(small_config(texts), half, resume=True)
    check_same(half, whole)


def failing_after(calls, function):
    """The function, so many times; then there is no memory."""
    done = []

    def call(*args, **options):
        done.append(1)
        return function(*args, **options) if len(done) <= calls else no_room()

    return call


@pytest.mark.parametrize(("B", "options"), [(4, "train.accumulate=2"), (9, "train.accumulate=3")])
def test_no_room_in_mid_run_saves(texts, run, monkeypatch, B, options):
    monkeypatch.setattr(GPT, "loss", failing_after(6, GPT.loss))
    with pytest.raises(ValueError, match=rf"saved .*latest\.pt after 6 updates: .*--resume and --set {options}$"):
        train(small_config(texts, f"train.B={B}", "output.eval_every=100"), run)
    assert content(run.latest)["step"] == len(losses(run)) == 6


@pytest.mark.parametrize("step", [8, 6])
def test_no_room_for_the_sample_costs_no_update(texts, whole, run, monkeypatch, step):
    """At a checkpoint, and between two."""
    config = small_config(texts, f"output.sample_every={step}")
    monkeypatch.setattr(loop, "stream_text", no_room)
    with pytest.raises(ValueError, match=rf"sample.*after {step} updates: .*--set output\.sample_every=0"):
        train(config, run)
    assert content(run.latest)["step"] == len(losses(run)) == step
    monkeypatch.undo()
    train(small_config(texts), run, resume=True)
    assert metric_lines(run.path) == metric_lines(whole.path)
    assert same(content(run.latest), content(whole.latest))


def test_a_sample_that_fails_otherwise_comes_after_the_checkpoint(texts, run, monkeypatch):
    def broken(*args, **options):
        raise Crash

    monkeypatch.setattr(loop, "_write_sample", broken)
    with pytest.raises(Crash):
        train(small_config(texts, "output.sample_every=4"), run)
    assert content(run.latest)["step"] == 4


def test_no_room_for_an_evaluation_costs_no_update(texts, run, monkeypatch):
    monkeypatch.setattr(ByteTask, "evaluate", no_room)
    with pytest.raises(ValueError, match=r"evaluation.*after 3 updates: .*--set train\.B=2"):
        train(small_config(texts), run)
    assert content(run.latest)["step"] == len(losses(run)) == 3


# --- a full disk -------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_of_at_most(size):
    """The system refuses to write a file beyond the size, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_leaves_the_checkpoints_and_the_run_goes_on_later(texts, whole, run):
    with files_of_at_most(20_000) as limit:
        reporter = Spy(lambda done: limit() if done == 7 else None)
        with pytest.raises(OSError, match=r"step_00000008\.pt"):
            train(small_config(texts), run, report=reporter)
    assert content(run.latest)["step"] == 4
    assert same(content(run.latest), content(whole.step_path(4)))
    assert not [path for path in run.path.rglob("*") if path.name.endswith(".tmp")]
    train(small_config(texts), run, resume=True)
    check_same(run, whole)
