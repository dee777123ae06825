"""The run folder: checkpoints, metrics, lock."""

import contextlib
import errno
import json
import os
import shutil

import pytest
import torch

from niels_gpt.data.source_paths import with_absolute_paths
from niels_gpt.model.gpt import GPT
from niels_gpt.runs import environment, sharded_checkpoint
from niels_gpt.runs import folder as folder_module
from niels_gpt.runs.checkpoint import CheckpointError
from niels_gpt.runs.folder import MetricsLog, RunFolder
from niels_gpt.system.processes import SINGLE_PROCESS
from niels_gpt.training.resume import TrainState, sharded_content
from tests.training import small_config

SIZES = {"V": 8, "T": 4, "C": 4, "L": 1, "H": 1, "dropout": 0.0}


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.checkpoints.mkdir(parents=True)
    return folder


def save(run, step, *, numbered=True, best=False, keep=3):
    """Write a checkpoint whose weights equal its step."""
    torch.manual_seed(0)
    model = GPT(SIZES)
    with torch.no_grad():
        model.tok_emb.weight.fill_(step)
    optimizer = torch.optim.AdamW(model.parameters())
    run.save(model, optimizer, step, {"best": None}, numbered=numbered, best=best, keep=keep)


def step_of(path):
    payload = torch.load(path, weights_only=True)
    assert payload["model"]["tok_emb.weight"][0, 0].item() == payload["step"]
    return payload["step"]


def truncate(path, size=100):
    with path.open("r+b") as file:
        file.truncate(size)


# --- orphans -------------------------------------------------------------------


def test_files_of_a_run_without_config(run):
    assert run.orphan() is None
    run.metrics_path.write_text('{"step": 0, "lo', encoding="utf-8")
    assert run.orphan() is None
    run.metrics_path.write_text('{"step": 0, "loss": 2.0}\n', encoding="utf-8")
    assert run.orphan() == run.metrics_path
    save(run, 2)
    assert run.orphan().parent == run.checkpoints
    run.config_path.write_text("", encoding="utf-8")
    assert run.orphan() is None


# --- checkpoints -------------------------------------------------------------------------------------


def test_discarding_diverged_checkpoints(run):
    for step in (2, 4, 6):
        save(run, step, keep=9)
    assert run.discard_from(4) == run.step_path(2)
    assert step_of(run.latest) == 2
    assert run.step_files() == [run.step_path(2)]
    aside = [run.checkpoints / f"diverged_step_0000000{step}.pt" for step in (4, 6)]
    assert [step_of(path) for path in aside] == [4, 6]
    save(run, 4)
    assert run.discard_from(1) is None
    assert not run.latest.exists()
    assert run.newest_checkpoint("cpu") == (None, {}, [])
    assert step_of(aside[0]) == 4


def test_discarding_sharded_checkpoints(run):
    for step in (2, 4):
        run.step_path(step).with_suffix("").mkdir()
    (run.checkpoints / "latest").symlink_to("step_00000004")
    assert run.discard_from(4) == run.step_path(2).with_suffix("")
    assert run.latest.resolve() == run.step_path(2).with_suffix("").resolve()
    assert (run.checkpoints / "diverged_step_00000004").is_dir()


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_and_the_best_are_kept_and_latest_is_the_last(run, keep):
    save(run, 1, best=True, keep=keep)
    for step in (2, 6, 8, 100):
        save(run, step, keep=keep)
        assert step_of(run.latest) == step
    kept = [100, 8, 6][:keep]
    assert [step_of(path) for path in run.step_files()] == kept
    names = [f"step_{step:08d}.pt" for step in sorted(kept)]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["best.pt", "config.json", "latest.pt", *names]
    assert step_of(run.best) == 1


def test_a_best_between_two_checkpoints(run):
    save(run, 1, numbered=False)  # neither numbered nor best
    assert list(run.checkpoints.iterdir()) == []
    save(run, 2)
    save(run, 3, numbered=False, best=True)
    assert (step_of(run.best), step_of(run.latest)) == (3, 2)
    assert [step_of(path) for path in run.step_files()] == [2]


def test_the_model_to_use(run):
    with pytest.raises(ValueError, match=rf"{run.path}.*no checkpoint.*train {run.path} --resume"):
        run.model_path()
    save(run, 2)
    assert run.model_path() == run.latest
    save(run, 4, best=True)
    assert run.model_path() == run.best


def test_the_newest_checkpoint(run):
    assert run.newest_checkpoint("cpu") == (None, {}, [])
    save(run, 2)
    save(run, 4)
    path, payload, warnings = run.newest_checkpoint("cpu")
    assert (path, payload["step"], warnings) == (run.latest, 4, [])


def test_a_damaged_latest_falls_back_to_an_older_one(run):
    for step in (2, 4, 6):
        save(run, step)
    truncate(run.latest)  # a hard link of step 6, so that is gone too
    _, payload, warnings = run.newest_checkpoint("cpu")
    assert payload["step"] == 4
    assert any(str(run.latest) in text for text in warnings)
    for path in run.step_files():
        truncate(path)
    with pytest.raises(CheckpointError, match=r"latest\.pt"):
        run.newest_checkpoint("cpu")


def test_a_missing_latest_falls_back_to_the_numbered_ones(run):
    save(run, 2)
    save(run, 4)
    run.latest.unlink()
    path, payload, _ = run.newest_checkpoint("cpu")
    assert (path, payload["step"]) == (run.step_path(4), 4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_latest_and_retention_work_for_folders_and_files(run):
    model = GPT(SIZES)
    state = TrainState(model, torch.optim.AdamW(model.parameters()))

    def save_next(sharded):
        state.step += 1
        torch.nn.init.constant_(model.tok_emb.weight, state.step)
        if sharded:
            run.save_sharded(*sharded_content(state, {"best": None}), SINGLE_PROCESS, keep=2)
        else:
            save(run, state.step, keep=2)
        path, saved, damaged = run.newest_checkpoint("cpu")
        assert (path, saved["step"], damaged) == (run.latest, state.step, [])
        assert saved["model"]["tok_emb.weight"].eq(state.step).all()
        return sorted(path.name for path in run.checkpoints.iterdir())

    assert [save_next(True) for _ in range(3)][-1] == ["latest", "step_00000002", "step_00000003"]
    assert save_next(False) == ["config.json", "latest.pt", "step_00000003", "step_00000004.pt"]
    before = (run.checkpoints / "latest.pt").read_bytes()
    assert save_next(True) == ["config.json", "latest", "step_00000004.pt", "step_00000005"]
    # A kill between the two renames leaves both pointers: the newer one counts.
    (run.checkpoints / "latest.pt").write_bytes(before)
    for time, step in ((1, 5), (2**33, 4)):
        os.utime(run.checkpoints / "latest.pt", (time, time))
        assert run.newest_checkpoint("cpu")[1]["step"] == step
    shutil.rmtree(run.checkpoints / "step_00000005")  # a dangling link does not count
    (run.checkpoints / "latest.pt").unlink()
    assert run.newest_checkpoint("cpu")[0].name == "step_00000004.pt"


# --- metrics -----------------------------------------------------------------------------------------


def write_metrics(run, steps, tail=""):
    text = "".join(json.dumps({"step": step, "loss": step / 8}) + "\n" for step in steps)
    run.metrics_path.write_text(text + tail, encoding="utf-8")


@pytest.mark.parametrize("truncated", ['{"step": 5, "loss": 1.25', "\0\0\0\0"])
def test_a_truncated_last_line_is_skipped(run, truncated):
    write_metrics(run, range(5), truncated)
    assert [line["step"] for line in run.metrics()] == [0, 1, 2, 3, 4]
    run.keep_metrics_before(5)
    log = MetricsLog(run.metrics_path)
    log.write({"step": 5, "loss": 0.625})
    log.close()
    lines = [json.loads(line) for line in run.metrics_path.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("step", [0, 3, 9])
def test_lines_of_steps_that_run_again_are_dropped(run, step):
    write_metrics(run, range(6))
    run.keep_metrics_before(step)
    assert run.metrics() == [{"step": s, "loss": s / 8} for s in range(min(step, 6))]


@pytest.mark.parametrize("how", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
def test_a_run_that_is_gone_is_noticed_at_the_next_line(run, how):
    run.config_path.touch()
    with contextlib.closing(MetricsLog(run.metrics_path)) as log:
        log.write({"step": 0, "loss": 1.0})
        how(run.path)
        with pytest.raises(OSError, match=f"{run.path} was deleted or moved .*: restore it"):
            log.write({"step": 1, "loss": 1.0})
    assert not run.path.exists()


def test_lines_follow_a_replaced_file(run):
    """An editor or a program that synchronizes folders replaces files."""
    run.config_path.touch()
    with contextlib.closing(MetricsLog(run.metrics_path)) as log:
        log.write({"step": 0, "loss": 1.0})
        run.keep_metrics_before(9)  # writes a new file
        log.write({"step": 1, "loss": 1.0})
    assert [line["step"] for line in run.metrics()] == [0, 1]


def test_floats_round_trip_exactly(run):
    values = [0.1 + 0.2, 1e-300, 3.0000000000000004]
    run.keep_metrics_before(3)  # there is no file yet
    assert run.metrics() == []
    log = MetricsLog(run.metrics_path)
    for step, value in enumerate(values):
        log.write({"step": step, "loss": value})
        assert len(run.metrics()) == step + 1  # readable at once
    log.sync()
    log.close()
    run.keep_metrics_before(3)
    assert [line["loss"] for line in run.metrics()] == values


def test_lines_that_are_not_of_a_step_are_skipped(run):
    odd = [b"null", b"5", b"{}", b"[1]", b'{"step": "a"}', b'"step"', b"\xff\xfe{}", b'{"step": 1, "x": "\xe9"}']
    wrong = [{"step": 1, "loss": None}, {"step": 2, "loss": "2"}, {"step": True, "loss": 1.0}, {"loss": 1.0}]
    odd += [json.dumps(line).encode() for line in wrong]
    good = [json.dumps({"step": step, "loss": 1.0}).encode() for step in range(4)]
    run.metrics_path.write_bytes(b"\n".join([good[0], *odd, good[1], *odd, *good[2:]]) + b"\n")
    assert run.metrics() == [{"step": step, "loss": 1.0} for step in range(4)]
    run.keep_metrics_before(2)
    lines = [json.loads(line) for line in run.metrics_path.read_bytes().splitlines()]
    assert lines == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 1.0}]


def test_a_full_disk_while_metrics_are_written(run):
    """Writes to /dev/full fail; the error names the file, and closing raises no other."""
    run.metrics_path.symlink_to("/dev/full")
    with (
        pytest.raises(OSError, match=r"metrics\.jsonl: No space left.*--resume") as err,
        contextlib.closing(MetricsLog(run.metrics_path)) as log,
    ):
        log.write({"step": 0})
    assert err.value.errno == errno.ENOSPC


# --- the folder --------------------------------------------------------------------------------------


def test_the_config_round_trips(tmp_path, run):
    assert not run.exists
    with pytest.raises(ValueError, match=r"config\.yaml"):
        run.read_config()
    config = small_config(tmp_path)
    run.write_config(config)
    assert run.exists
    assert run.read_config() == with_absolute_paths(config)


def test_a_released_folder_can_be_used_again(tmp_path, run):
    run.write_config(small_config(tmp_path))
    run.metrics_path.touch()
    run.tokenizer_path.write_bytes(b"pieces")
    run.release()
    assert not run.exists
    assert list(run.path.iterdir()) == [run.checkpoints]
    run.release()


def test_the_lock_is_exclusive_and_freed_after_an_error(run):
    with pytest.raises(KeyError), run.lock():
        with pytest.raises(ValueError, match="another process"), RunFolder(run.path).lock():
            pytest.fail("two processes hold the lock")
        assert run.samples.is_dir()
        raise KeyError
    with run.lock():
        pass


def test_temporary_files_of_a_killed_process_are_removed(run):
    half = run.checkpoints / ".step_00000004.pt.123.0.tmp"
    half.write_bytes(b"half")
    save(run, 2)
    with run.lock():
        assert not half.exists()
        assert step_of(run.latest) == 2


def test_a_deleted_folder_never_keeps_its_name(run, monkeypatch):
    """A kill while a folder is deleted leaves a hidden one, which the next lock removes."""
    folder = run.checkpoints / "step_00000002"
    folder.mkdir()
    removed = []
    monkeypatch.setattr(folder_module.shutil, "rmtree", removed.append)
    folder_module._remove(folder)
    assert removed == [run.checkpoints / ".step_00000002.gone.tmp"]
    assert not folder.exists()
    folder_module._remove(removed[0])  # a hidden one keeps its name
    assert removed[1] == removed[0]
    folder_module._remove(run.checkpoints / "missing.pt")


def test_an_error_that_is_not_a_full_disk_has_no_remedy(run):
    log = MetricsLog(run.metrics_path)
    log.close()
    with pytest.raises(OSError, match=r"metrics\.jsonl") as err, log._describing_errors():
        raise OSError(errno.EIO, "Input/output error")
    assert "--resume" not in str(err.value)


def test_reading_without_tensors(run, monkeypatch):
    """With tensors=False only a sharded checkpoint, which is a folder, is read in part."""
    save(run, 2)
    assert "model" in run.read(run.latest, "cpu", tensors=False)
    folder = run.checkpoints / "step_00000004"
    folder.mkdir()
    heads = []
    monkeypatch.setattr(sharded_checkpoint, "read_head", lambda path, verify: heads.append((path, verify)) or {})
    assert run.read(folder, "cpu", tensors=False, verify=False) == {}
    assert heads == [(folder, False)]
    with pytest.raises(FileNotFoundError):
        run.read(folder, "cpu")


def test_retention_of_a_resumed_run_never_deletes_what_it_resumed_from(run):
    for step in range(1, 7):
        save(run, step, keep=9)
    run.retain(2, up_to=4)  # 5 and 6 are damaged
    assert [step_of(path) for path in run.step_files()] == [6, 5, 4, 3]


def test_the_outputs_after_the_last_checkpoint(run):
    run.samples.mkdir()
    for path in (run.checkpoints / "latest.pt", run.metrics_path, run.plot_path, run.sample_path(4)):
        assert not run.has_outputs_of(4)
        path.touch()
    assert not run.has_outputs_of(4)
    with environment.recorded_session(run.path, step=0, processes=1, machine={}, data=[], fingerprint={}) as session:
        assert not run.has_outputs_of(4)  # killed, or the disk was full when it ended
        session.outcome = environment.FINISHED
    assert run.has_outputs_of(4) and not run.has_outputs_of(5)
    os.utime(run.plot_path, (1, 1))
    assert not run.has_outputs_of(4)


@pytest.mark.parametrize("best", [3, 1])
def test_links_that_a_kill_prevented_are_restored(run, best):
    """`save` writes the numbered checkpoint, then best.pt, then latest.pt."""
    run.step_path(3).write_bytes(b"checkpoint")
    run.restore_links(run.step_path(3), 3, {"step": best, "loss": 2.0})
    assert run.latest.samefile(run.step_path(3))
    assert run.best.exists() == (best == 3)
    run.step_path(4).write_bytes(b"later")
    run.restore_links(run.step_path(4), 4, {"step": 4, "loss": 1.0})
    assert run.latest.samefile(run.step_path(3))  # an existing link stays
