"""The training loop: what is trained, what a run leaves behind, how it stops, resumes and fails."""

import contextlib
import json
import math
import os
import re
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch

from niels_gpt.config.yaml_file import load_config
from niels_gpt.data.source_paths import with_absolute_paths
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import load_model
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system.rng import derive_seed
from niels_gpt.training import loop
from niels_gpt.training.loop import DeviceFailed, TrainingDiverged, train
from niels_gpt.training.tasks.byte_task import ByteTask
from niels_gpt.training.tasks.registry import open_task
from tests import token_caches
from tests.training import (
    Crash,
    Spy,
    crash_at,
    data_options,
    metric_lines,
    same,
    small_config,
    weights_sha256,
    write_texts,
)


@pytest.fixture(scope="module")
def full(texts, tmp_path_factory):
    """An uninterrupted run."""
    run = RunFolder(tmp_path_factory.mktemp("full") / "run")
    result = train(small_config(texts), run)
    assert (result.step, result.stopped_by, result.run_dir) == (12, None, run.path)
    return run


def test_the_backend_is_printed_and_recorded(texts, tmp_path):
    """engine.backend=plain holds for the whole run, and for nothing after it."""
    losses = {}
    for options, name in ((["engine.backend=plain"], "plain"), ([], "cpu")):
        spy, run = Spy(), tmp_path / name
        train(
            small_config(texts, "train.total_steps=2", "train.warmup_steps=1", *options), run, device="cpu", report=spy
        )
        assert f"backend: {name}" in spy.notes
        (session,) = json.loads((run / "environment.json").read_text(encoding="utf-8"))["sessions"]
        assert session["machine"]["backend"] == name
        losses[name] = [line["loss"] for line in metric_lines(run) if "loss" in line]
    assert losses["plain"] == pytest.approx(losses["cpu"], abs=1e-5)
    with pytest.raises(ValueError, match=r"engine\.backend must be one of 'auto', 'plain', got 'fast'"):
        small_config(texts, "engine.backend=fast")


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "run")


@pytest.fixture(scope="module")
def half_run(texts, tmp_path_factory):
    run = RunFolder(tmp_path_factory.mktemp("half") / "run")
    with pytest.raises(Crash):
        train(small_config(texts), run, report=crash_at(10))
    return run


@pytest.fixture
def half(half_run, run):
    """A copy of a run that crashed after its second checkpoint."""
    shutil.copytree(half_run.path, run.path)
    return run


def losses(run):
    return [line["loss"] for line in metric_lines(run.path)]


def content(path):
    return torch.load(path, weights_only=True)


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- the call ----------------------------------------------------------------------------------------


def test_one_call_trains_into_a_new_run(texts, full, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reporter = Spy()
    result = train(small_config(texts), report=reporter)
    assert result.run_dir == Path("runs/train")
    assert (result.step, result.best) == (12, content(full.latest)["extra"]["best"])
    assert result.evals == metric_lines(full.path)[-1]["evals"]
    assert (reporter.sources, reporter.closed) == (["roam", "primer"], True)
    assert losses(RunFolder(result.run_dir)) == losses(full)
    assert train(small_config(texts, "train.total_steps=3")).run_dir == Path("runs/train-2")
    assert train(small_config(texts), str(result.run_dir), device="cpu", resume=True).step == 12


def test_the_vocabulary_of_a_token_task_is_set(tmp_path):
    config = token_caches.small_config("pretrain", "train.total_steps=3", "model.V=300")
    train(config, tmp_path / "run")
    assert token_caches.tokenizer().vocab_size == load_model(RunFolder(tmp_path / "run").latest)[0].config.V


# --- what is trained ---------------------------------------------------------------------------------


GOLDEN = {
    "adamw": "5.53909 5.08322 4.84219 4.61333 4.36921 4.34642 3.9965 3.82652 3.67351 3.51689 3.35931 3.27184",
    "muon": "5.53909 5.30721 5.01565 4.72186 4.46435 4.22147 3.99154 3.7874 3.6083 3.44204 3.28212 3.20529",
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_golden_losses(texts, run, optimizer):
    """A change that should not change training must not change these (--config debug, on fixed text)."""
    changes = ["train.p_train={roam: 0.5, primer: 0.5}", "train.p_val={roam: 0.5, primer: 0.5}"]
    changes += ["output.checkpoint_every=100", f"train.optimizer={optimizer}"]
    config = load_config("debug", overrides=[*changes, *data_options(texts)])
    with pytest.raises(Crash):
        train(config, run, report=crash_at(12))
    assert losses(run) == pytest.approx([float(loss) for loss in GOLDEN[optimizer].split()], rel=1e-3)


def test_every_step_equals_that_of_a_naive_loop(texts, run):
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
        progress = (step - 2) / 9
        lr = 1e-2 * step / 2 if step < 2 else 1e-3 + 9e-3 * (1 + math.cos(math.pi * progress)) / 2
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


def test_bf16_training_multiplies_in_bf16_and_keeps_float32_weights(texts, tmp_path, monkeypatch):
    seen, linear = set(), torch.nn.functional.linear

    def watch(x, *rest):
        y = linear(x, *rest)
        seen.add((y.dtype, torch.is_grad_enabled()))
        return y

    monkeypatch.setattr(torch.nn.functional, "linear", watch)
    bf16, fp32 = RunFolder(tmp_path / "bf16"), RunFolder(tmp_path / "fp32")
    short = ["train.total_steps=4", "output.eval_every=2"]
    train(small_config(texts, *short, "train.precision=bf16"), bf16)
    assert seen == {(torch.bfloat16, True), (torch.float32, False)}  # training, evaluation
    train(small_config(texts, *short), fp32)
    assert losses(bf16) != losses(fp32)
    assert losses(bf16) == pytest.approx(losses(fp32), rel=0.01)
    assert {w.dtype for w in content(bf16.latest)["model"].values()} == {torch.float32}


# --- what is left behind -----------------------------------------------------------------------------


def test_the_folder_of_a_run(texts, full):
    found = sorted(str(path.relative_to(full.path)) for path in full.path.rglob("*") if path.is_file())
    assert found == [
        ".config.yaml.json",
        "checkpoints/best.pt",
        "checkpoints/config.json",
        "checkpoints/latest.pt",
        "checkpoints/step_00000004.pt",
        "checkpoints/step_00000008.pt",
        "checkpoints/step_00000012.pt",
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
        "notes.json",
        "run.lock",
        "samples/step_00000012.txt",
        "skipped.json",
    ]
    assert full.read_config() == with_absolute_paths(small_config(texts))
    lines = metric_lines(full.path)
    assert [line["step"] for line in lines] == list(range(12))
    assert [line["step"] + 1 for line in lines if "evals" in line] == [3, 6, 9, 12]
    assert all(set(line["evals"]) == {"val_roam", "val_chat"} for line in lines if "evals" in line)
    assert json.loads((full.checkpoints / "config.json").read_text(encoding="utf-8"))["C"] == 16
    model, step = load_model(full.best)
    value = open_task(small_config(texts)).evaluate(model, "cpu")[1]
    assert content(full.latest)["extra"]["best"] == {"step": step, "loss": pytest.approx(value, rel=1e-6)}


def test_samples_continue_the_prompt_and_output_settings_do_not_change_the_weights(texts, full, run):
    settings = ["output.checkpoint_every=1", "output.eval_every=1", "output.keep=1", "output.sample_every=5"]
    train(small_config(texts, *settings, "output.sample_prompt=hello", "output.sample_tokens=9"), run)
    assert losses(run) == losses(full)
    assert weights_sha256(run.latest) == weights_sha256(full.latest)
    samples = {path.name: path.read_text(encoding="utf-8") for path in run.samples.iterdir()}
    assert sorted(samples) == ["step_00000005.txt", "step_00000010.txt", "step_00000012.txt"]
    assert all(text.startswith("hello") and len(text) > len("hello\n") for text in samples.values())


class Scripted(ByteTask):
    """Validation losses from a list."""

    def __init__(self, config, values):
        super().__init__(config, open_task(config).streams)
        self.values = iter(values)

    def evaluate(self, model, device, world):
        value = next(self.values)
        return {"val_wiki": value}, value


@pytest.mark.parametrize(("values", "best"), [([1, 2, 3, 4], 3), ([3, 1, 2, 1.5], 6), ([2, 2, 2, 1.9], 12)])
def test_the_best_checkpoint_has_the_lowest_validation_loss(texts, run, values, best):
    config = small_config(texts, "output.keep=1")
    result = train(config, run, task=Scripted(config, values))
    assert content(run.best)["step"] == best
    assert content(run.latest)["step"] == 12
    assert result.best == {"step": best, "loss": min(values)}
    assert load_model(run.best)[1] == best


def test_a_validation_loss_that_is_nan_stops_the_run_and_is_never_the_best(texts, run):
    config = small_config(texts, "output.checkpoint_every=5")
    with pytest.raises(TrainingDiverged, match=r"nan after step 5\b.*step_00000005\.pt"):
        train(config, run, task=Scripted(config, [3.0, math.nan]))
    assert (content(run.best)["step"], content(run.latest)["step"]) == (3, 5)


def test_the_files_of_a_run_are_not_overwritten(texts, half):
    """Not those of a run without a config either."""
    for facts in (r"run.*--resume.*--run-dir", r"checkpoints/best\.pt .*config\.yaml.*another folder"):
        before = snapshot(half.path)
        with pytest.raises(ValueError, match=facts):
            train(small_config(texts), half)
        assert snapshot(half.path) == before
        half.config_path.unlink(missing_ok=True)


def test_init_from_is_checked_before_the_data_is_read(texts, run, monkeypatch):
    monkeypatch.setattr(loop, "open_task", pytest.fail)
    with pytest.raises(ValueError, match=r"init_from.*nowhere\.pt"):
        train(small_config(texts, "init_from=nowhere.pt"), run)


# --- a device that fails -----------------------------------------------------------------------------


def failing_at(step, monkeypatch):
    step_of = loop.StepRunner.step

    def fails(self, batch, *, step, lr):
        if step == fails.step:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure\nand a page of advice")
        return step_of(self, batch, step=step, lr=lr)

    fails.step = step
    monkeypatch.setattr(loop.StepRunner, "step", fails)


def test_a_device_failure_names_the_checkpoint_to_resume_from(texts, run, full, monkeypatch):
    config = small_config(texts)
    failing_at(10, monkeypatch)
    with pytest.raises(DeviceFailed) as err:
        train(config, run)
    for fact in ("cpu", "10 steps", "(CUDA error: unspecified launch failure)", str(run.step_path(8)), "--resume"):
        assert fact in str(err.value)
    assert err.value.leave_at_once
    monkeypatch.undo()
    assert train(config, run, resume=True).step == 12
    assert weights_sha256(run.latest) == weights_sha256(full.latest)


def test_a_device_failure_in_the_first_step_leaves_the_folder_free(texts, run, monkeypatch):
    failing_at(0, monkeypatch)
    with pytest.raises(DeviceFailed, match=r"0 steps .* no checkpoint"):
        train(small_config(texts), run)
    monkeypatch.undo()
    assert train(small_config(texts), run).step == 12


# --- divergence --------------------------------------------------------------------------------------


def test_a_diverged_run_resumes_from_a_checkpoint_that_is_good(texts, run):
    """base_lr=1e33 breaks the weights in step 1; the checkpoint of step 2 is already bad."""
    often = ("train.warmup_steps=1", "output.checkpoint_every=1", "output.eval_every=100")
    with pytest.raises(TrainingDiverged, match=r"step 2\b.*step_00000001\.pt.*--resume --allow-config-change"):
        train(small_config(texts, "train.base_lr=1e33", *often), run)
    assert content(run.latest)["step"] == 1
    model, _ = load_model(run.latest)
    assert all(weight.isfinite().all() for weight in model.parameters())
    lower = small_config(texts, "train.base_lr=1e-3", *often)
    assert train(lower, run, resume=True, allow_config_change=True).step == 12
    assert all(math.isfinite(loss) for loss in losses(run))


def test_a_run_that_diverges_before_its_first_checkpoint_starts_again(texts, run):
    with pytest.raises(TrainingDiverged, match=r"step 1\b.*no earlier checkpoint.*--resume --allow-config-change"):
        train(small_config(texts, "train.base_lr=1e30", "train.warmup_steps=0"), run)
    assert losses(run) == [pytest.approx(math.log(256), abs=0.3)]
    for line in run.metrics_path.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)
    lower = small_config(texts, "train.base_lr=1e-3", "train.warmup_steps=0")
    assert train(lower, run, resume=True, allow_config_change=True).step == 12
    assert [line["step"] for line in run.metrics()] == list(range(12))


def test_a_run_whose_last_step_diverges_fails(texts, run):
    with pytest.raises(TrainingDiverged):
        train(small_config(texts, "train.base_lr=1e30", "train.warmup_steps=0", "train.total_steps=1"), run)


@pytest.mark.parametrize(("loss", "norm", "named"), [(math.inf, 1.0, "loss.* inf"), (1.0, math.nan, "gradient.* nan")])
def test_a_metrics_line_must_be_finite(run, loss, norm, named):
    loop._check_finite({"step": 3, "loss": 1.0, "grad_norm": 2.0, "lr": 0.5}, run)
    with pytest.raises(TrainingDiverged, match=rf"{named} at step 3 \(learning rate 0\.5\)"):
        loop._check_finite({"step": 3, "loss": loss, "grad_norm": norm, "lr": 0.5}, run)


# --- resume ------------------------------------------------------------------------------------------


def check_same(run, full):
    assert metric_lines(run.path) == metric_lines(full.path)
    for name in ("latest", "best"):
        old, new = content(getattr(full, name)), content(getattr(run, name))
        assert same(new, old), name
    assert [path.name for path in run.step_files()] == [path.name for path in full.step_files()]
    for path in full.samples.iterdir():
        assert (run.samples / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("step", [4, 5, 12])
def test_a_run_that_crashed_resumes_bit_for_bit(texts, full, run, step):
    reporter = crash_at(step)
    with pytest.raises(Crash):
        train(small_config(texts), run, report=reporter)
    assert reporter.closed
    torch.manual_seed(step)  # the global state must not matter
    reporter = Spy()
    result = train(small_config(texts), run, resume=True, report=reporter)
    assert result.step == 12
    start = (step - 1) // 4 * 4
    assert any(f"step {start}" in note for note in reporter.notes)
    check_same(run, full)
    assert result.best == content(full.latest)["extra"]["best"]


@pytest.mark.parametrize(
    "options",
    [["train.optimizer=muon", "train.accumulate=2", "output.keep=1"], ["train.precision=bf16", "train.total_steps=9"]],
)
def test_other_settings_resume_bit_for_bit_too(texts, tmp_path, options):
    config = small_config(texts, *options)
    full, run = RunFolder(tmp_path / "full"), RunFolder(tmp_path / "run")
    train(config, full)
    for step in (6, 7):  # twice in one run
        with pytest.raises(Crash):
            train(config, run, resume=run.exists, report=crash_at(step))
    train(config, run, resume=True)
    check_same(run, full)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 1), (signal.SIGHUP, 4)])
def test_a_signal_stops_and_saves(texts, full, run, number, step):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    reporter = Spy(lambda done: os.kill(os.getpid(), number) if done == step else None)
    result = train(small_config(texts), run, report=reporter)
    assert result.stopped_by == result.signal == number.name
    assert result.step in (step, step + 1)  # it arrives within a step, or just after it
    assert content(run.latest)["step"] == result.step
    assert len(losses(run)) == result.step
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    result = train(small_config(texts), run, resume=True)
    assert (result.step, result.stopped_by) == (12, None)
    assert metric_lines(run.path) == metric_lines(full.path)
    assert same(content(run.latest), content(full.latest))


def test_an_ignored_signal_stays_ignored(texts, run):
    """nohup ignores SIGHUP, and a shell the SIGINT of background jobs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        reporter = Spy(lambda done: os.kill(os.getpid(), signal.SIGHUP))
        result = train(small_config(texts, "train.total_steps=3"), run, report=reporter)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result.step, result.signal) == (3, None)


def test_a_signal_in_the_last_step_does_not_stop_the_run(texts, full, run):
    reporter = Spy(lambda done: os.kill(os.getpid(), signal.SIGTERM) if done == 12 else None)
    result = train(small_config(texts), run, report=reporter)
    assert (result.step, result.stopped_by, result.signal) == (12, None, "SIGTERM")
    check_same(run, full)


def test_a_second_ctrl_c_interrupts(texts, run):
    def twice(done):
        if done == 6:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(small_config(texts), run, report=Spy(twice))
    assert content(run.latest)["step"] == 4


def test_it_trains_in_a_thread(texts, full, run):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(small_config(texts), run)))
    thread.start()
    thread.join()
    assert results[0].step == 12
    check_same(run, full)


def test_resuming_a_finished_run_changes_nothing(texts, full, run):
    shutil.copytree(full.path, run.path)
    result = train(small_config(texts), run, resume=True)
    assert result.step == 12
    assert result.best == content(full.latest)["extra"]["best"]
    check_same(run, full)


def test_a_resumed_run_deletes_the_checkpoints_that_a_killed_one_left(texts, full, run):
    shutil.copytree(full.path, run.path)
    shutil.copy(run.step_path(12), run.step_path(1))
    keep = len(full.step_files())
    train(small_config(texts, f"output.keep={keep}"), run, resume=True)
    assert [path.name for path in run.step_files()] == [path.name for path in full.step_files()]


def test_a_damaged_checkpoint_is_skipped(texts, full, run):
    shutil.copytree(full.path, run.path)
    for path in (run.latest, run.step_path(12)):
        with path.open("r+b") as file:
            file.truncate(1000)
    reporter = Spy()
    train(small_config(texts), run, resume=True, report=reporter)
    assert any("latest.pt" in note and "damaged" in note for note in reporter.notes)
    assert any("step 8" in note for note in reporter.notes)
    check_same(run, full)


# --- what is rejected --------------------------------------------------------------------------------


def test_an_option_that_is_missing_in_a_checkpoint_has_its_default(texts, full, half):
    """Checkpoints of older versions."""
    for path in half.step_files():
        saved = content(path)
        del saved["extra"]["config"]["train"]["precision"]
        torch.save(saved, path)
    with pytest.raises(ValueError, match=r"train\.precision was 'fp32', is 'bf16'"):
        train(small_config(texts, "train.precision=bf16"), half, resume=True)
    train(small_config(texts), half, resume=True)
    check_same(half, full)


def test_another_config_if_allowed(texts, full, half):
    changes = ["train.total_steps=14", "train.weight_decay=5.0", "train.betas=[0.1, 0.2]"]
    before = snapshot(half.path)
    with pytest.raises(ValueError, match=r"train\.weight_decay was 0\.1, is 5\.0.*--allow-config-change"):
        train(small_config(texts, *changes), half, resume=True)
    assert snapshot(half.path) == before
    result = train(small_config(texts, *changes), half, resume=True, allow_config_change=True)
    assert result.step == 14
    assert half.read_config().train.total_steps == 14
    assert [line["step"] for line in metric_lines(half.path)] == list(range(14))
    assert losses(half)[9] != losses(full)[9]  # the optimizer uses the new values


def test_other_data_is_rejected_unless_allowed(tmp_path, run):
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


def test_nothing_to_resume_and_an_invalid_schedule_write_nothing(texts, run):
    with pytest.raises(ValueError, match="12 steps"):
        train(small_config(texts, "train.warmup_steps=12"), run)
    with pytest.raises(ValueError, match=r"nothing to resume.*run.*config\.yaml"):
        train(small_config(texts), run, resume=True)
    assert not run.path.exists()


def test_a_run_that_started_while_the_data_was_read_is_not_overwritten(texts, run, monkeypatch):
    config = small_config(texts)

    def slow(config):
        monkeypatch.undo()
        train(config, run.path)
        return open_task(config)

    monkeypatch.setattr(loop, "open_task", slow)
    with pytest.raises(ValueError, match=r"niels-gpt train .* --resume.*--run-dir"):
        train(config, run)
    assert len(losses(run)) == 12


@pytest.mark.parametrize("resume", [False, True])
def test_two_processes_cannot_train_into_one_folder(texts, half, tmp_path, resume):
    folder = half if resume else RunFolder(tmp_path / "new")
    with RunFolder(folder.path).lock(), pytest.raises(ValueError, match="another process"):
        train(small_config(texts), folder, resume=resume)


def test_a_file_where_the_folder_should_be(texts, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine", encoding="utf-8")
    for path in (file, file / "run"):
        with pytest.raises(ValueError, match=r"file.*--run-dir"):
            train(small_config(texts), path)
    assert file.read_text(encoding="utf-8") == "mine"


# --- memory ------------------------------------------------------------------------------------------


def no_memory(*args, **options):
    """Raises what torch raises on a CPU without memory."""
    return torch.empty(2**50)


def test_a_model_that_does_not_fit_is_reported_with_its_size(texts, run, monkeypatch):
    with pytest.raises(ValueError, match=r"[\d,]+ weights \([\d,]+ GiB\)"):
        train(small_config(texts, "model.d_ff=1000000000000"), run)
    assert not run.path.exists()
    monkeypatch.setattr(loop, "GPT", no_memory)
    with pytest.raises(ValueError, match=r"model of 7,216 weights \(0\.00 GiB\) on cpu"):
        train(small_config(texts), run)
    assert not run.exists


@pytest.mark.parametrize("where", ["loss", "batch"])
def test_a_first_step_that_does_not_fit_leaves_the_folder_free(texts, full, run, monkeypatch, where):
    monkeypatch.setattr(*((GPT, "loss") if where == "loss" else (ByteTask, "batch")), no_memory)
    with pytest.raises(ValueError, match=r"one row of T=16" if where == "loss" else "batch of 4 rows"):
        train(small_config(texts), run)
    assert not run.exists
    monkeypatch.undo()
    train(small_config(texts), run)
    check_same(run, full)


def test_a_resumed_run_that_does_not_fit_keeps_its_folder(texts, full, half, monkeypatch):
    monkeypatch.setattr(GPT, "loss", no_memory)
    with pytest.raises(ValueError, match="one row of T=16"):
        train(small_config(texts), half, resume=True)
    monkeypatch.undo()
    train(small_config(texts), half, resume=True)
    check_same(half, full)


def failing_after(calls, function):
    """The function for some calls; then memory runs out."""
    done = []

    def call(*args, **options):
        done.append(1)
        return function(*args, **options) if len(done) <= calls else no_memory()

    return call


@pytest.mark.parametrize(("B", "option"), [(9, "train.accumulate=3"), (1, "engine.checkpoint_activations")])
def test_out_of_memory_in_a_later_step_saves(texts, run, monkeypatch, B, option):
    monkeypatch.setattr(GPT, "loss", failing_after(6, GPT.loss))
    resume = rf"niels-gpt train .* --resume --set {option}"
    with pytest.raises(ValueError, match=rf"saved .*latest\.pt after 6 steps.*{resume}"):
        train(small_config(texts, f"train.B={B}", "output.eval_every=100"), run)
    assert content(run.latest)["step"] == len(losses(run)) == 6


@pytest.mark.parametrize("step", [8, 6])
def test_out_of_memory_in_a_sample_loses_no_step(texts, full, run, monkeypatch, step):
    """At a checkpoint, and between two."""
    config = small_config(texts, f"output.sample_every={step}")
    monkeypatch.setattr(loop, "stream_text", no_memory)
    with pytest.raises(ValueError, match=rf"sample.*after {step} steps.*--set output\.sample_every=0"):
        train(config, run)
    assert content(run.latest)["step"] == len(losses(run)) == step
    monkeypatch.undo()
    train(small_config(texts), run, resume=True)
    assert metric_lines(run.path) == metric_lines(full.path)
    assert same(content(run.latest), content(full.latest))


def test_a_sample_that_fails_comes_after_the_checkpoint(texts, run, monkeypatch):
    def broken(*args, **options):
        raise Crash

    monkeypatch.setattr(loop, "_write_sample", broken)
    with pytest.raises(Crash):
        train(small_config(texts, "output.sample_every=4"), run)
    assert content(run.latest)["step"] == 4


@pytest.mark.parametrize(("B", "smaller"), [(4, 2), (1, 1)])
def test_out_of_memory_in_an_evaluation_loses_no_step(texts, run, monkeypatch, B, smaller):
    monkeypatch.setattr(ByteTask, "evaluate", no_memory)
    with pytest.raises(ValueError, match=rf"evaluation.*after 3 steps.*--set train\.B={smaller}$"):
        train(small_config(texts, f"train.B={B}"), run)
    assert content(run.latest)["step"] == len(losses(run)) == 3


# --- a full disk -------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_of_at_most(size):
    """The system rejects writes beyond a file size, as on a full disk, once the function is called."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_full_disk_keeps_the_checkpoints_and_the_run_resumes(texts, full, run):
    with files_of_at_most(20_000) as limit:
        reporter = Spy(lambda done: limit() if done == 7 else None)
        with pytest.raises(OSError, match=r"step_00000008\.pt"):
            train(small_config(texts), run, report=reporter)
    assert content(run.latest)["step"] == 4
    assert same(content(run.latest), content(full.step_path(4)))
    assert not [path for path in run.path.rglob("*") if path.name.endswith(".tmp")]
    train(small_config(texts), run, resume=True)
    check_same(run, full)


@pytest.mark.parametrize(
    "override", ["data.retain={a: 1}", "data.token_cache=x", "splice.alpha=3", "engine.graphs=true"]
)
def test_options_without_effect_are_refused_before_any_work_but_a_stored_config_is_read(tmp_path, override):
    config = load_config("debug", overrides=["train.total_steps=2"])
    unused = load_config("debug", overrides=["train.total_steps=2", override])
    with pytest.raises(ValueError, match=re.escape(override.partition("=")[0])):
        train(unused, tmp_path / "new", device="cpu")
    assert not (tmp_path / "new").exists()
    train(config, tmp_path / "run", device="cpu")
    assert train(unused, tmp_path / "run", device="cpu", resume=True).step == 2
