"""--track: every step once, also after a resume; nothing leaves the machine; a failing tracker does not end a run."""

import importlib.util
import json
import os
import struct
import sys
import types

import pytest

from niels_gpt.config import RunConfig
from niels_gpt.runs.folder import MetricsLog, RunFolder
from niels_gpt.training import tracking
from niels_gpt.training.progress import Silent
from niels_gpt.training.tracking import Several, TensorBoard, Tracking, WandB, check_trackers


def line(step):
    values = {"step": step, "loss": 5.0 - step, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 9.0}
    return {**values, "evals": {"val_roam": 3.0, "loss/secret.md": 2.0}} if step % 2 else values


class Notes(Silent):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


class Fake:
    """A tracker that remembers, by name of the run."""

    def __init__(self, run, config):
        self.logged, self.closed = [], False
        made.append(self)

    def log(self, step, values):
        self.logged.append((step, values))

    def close(self):
        self.closed = True


made = []


@pytest.fixture
def fake(monkeypatch):
    made.clear()
    monkeypatch.setitem(tracking.TRACKERS, "tensorboard", Fake)


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "my run")
    folder.path.mkdir()
    return folder


def session(run, first, last, *, names=("tensorboard",), warn=None, killed=False):
    """Train steps first .. last - 1, as the loop reports them."""
    run.keep_metrics_before(first)
    log = MetricsLog(run.metrics_path)
    tracker = Tracking(run, RunConfig(), names, warn or Silent())
    tracker.start(first=first, total=10)
    for step in range(first, last):
        log.write(line(step))
        tracker.step(line(step))
    log.close()
    if not killed:
        tracker.close()


def test_a_tracker_gets_every_line_once(run, fake):
    session(run, 0, 6, killed=True)
    session(run, 4, 8)  # from the checkpoint of step 4
    first, second = made
    assert [step for step, _ in first.logged] == [0, 1, 2, 3, 4, 5]
    assert [step for step, _ in second.logged] == list(range(8)) and second.closed
    expected = {"loss": 4.0, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 9.0, "evals/val_roam": 3.0}
    assert dict(second.logged)[1] == expected  # no name of a document


def test_a_run_may_be_tracked_from_a_later_start_on(run, fake):
    session(run, 0, 4, names=())
    session(run, 4, 6)
    assert [step for step, _ in made[0].logged] == list(range(6))


@pytest.mark.parametrize("fails", ["__init__", "log", "close"])
def test_a_tracker_that_fails_is_a_warning(run, fake, monkeypatch, fails):
    def fail(*_):
        raise RuntimeError("no\nspace")

    monkeypatch.setattr(Fake, fails, fail)
    notes = Notes()
    session(run, 0, 4, warn=notes)
    [note] = notes.notes
    assert note.startswith("warning: tensorboard has stopped") and "\n" not in note
    assert len(run.metrics()) == 4


def test_several_reporters_get_the_same():
    seen = []

    class Recorder(Silent):
        def __getattribute__(self, name):
            return lambda *args, **options: seen.append((name, args, options))

    both = Several(Recorder(), Recorder())
    for name, args, options in (
        ("data", ("task",), {}),
        ("start", (), {"first": 1, "total": 2}),
        ("step", ({},), {}),
        ("note", ("x",), {}),
        ("sample", (1, "p", "t"), {}),
        ("close", (), {}),
    ):
        getattr(both, name)(*args, **options)
        assert seen == [(name, args, options)] * 2
        seen.clear()


def test_a_missing_package_is_one_line(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="--track must be tensorboard or wandb, got 'mlflow'"):
        check_trackers(["mlflow"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'niels-gpt\[track\]'"):
        check_trackers(["wandb"])


def test_a_folder_of_the_name_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ValueError, match="not installed"):
        check_trackers(["wandb"])


def test_tensorboard_begins_anew(run, monkeypatch):
    """With a fake of the package: the files of a session before are removed, and forgotten from step 0 on."""
    folder, calls = run.path / "tensorboard", []
    record = types.SimpleNamespace(add_scalar=lambda *values: calls.append(values), close=lambda: calls.append("end"))
    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = lambda path, **options: calls.append((path, options["purge_step"])) or record
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    folder.mkdir()
    for name in ("events.out.tfevents.1", "mine.txt"):
        (folder / name).touch()
    tracker = TensorBoard(run.path, RunConfig())
    tracker.log(3, {"loss": 1.0})
    tracker.close()
    assert calls == [(str(folder), 0), ("loss", 1.0, 3), "end"]
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


def test_wandb_is_offline_whatever_the_user_has_set(run, monkeypatch):
    """With a fake of the package."""
    calls = {}
    fake = types.ModuleType("wandb")
    fake.Settings = lambda **settings: settings
    logged = []
    made_run = types.SimpleNamespace(log=lambda values, step: logged.append(step), finish=lambda: logged.append("end"))
    fake.init = lambda **options: calls.update(options) or made_run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    old = run.path / "wandb" / "offline-run-1-x"
    old.mkdir(parents=True)
    tracker = WandB(run.path, RunConfig())
    tracker.log(3, {"loss": 1.0})
    tracker.close()
    assert calls["mode"] == "offline" and os.environ["WANDB_MODE"] == "offline"
    assert calls["settings"]["console"] == "off" and not old.exists()
    assert set(calls["config"]) == {"task", "model", "train"}
    assert "/" not in json.dumps(calls["config"]) and logged == [3, "end"]


def real(name):
    found = importlib.util.find_spec(name)
    missing = found is None or found.origin is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed (extra track)")


@real("tensorboard")
def test_tensorboard_reads_every_step_once(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    session(run, 0, 6, killed=True)
    session(run, 4, 8)
    read = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("loss")] == [(step, 5.0 - step) for step in range(8)]
    assert [e.step for e in read.Scalars("evals/val_roam")] == [1, 3, 5, 7]


@real("wandb")
def test_wandb_writes_every_step_once_and_no_names(run, monkeypatch):
    import socket

    monkeypatch.setenv("WANDB_MODE", "online")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    session(run, 0, 4, names=("wandb",))
    session(run, 3, 6, names=("wandb",))
    with pytest.raises(TimeoutError):
        listener.accept()  # nobody called
    [folder] = (run.path / "wandb").glob("offline-run-*")
    [file] = folder.glob("*.wandb")
    assert b"secret.md" not in file.read_bytes()
    assert wandb_steps(file.read_bytes()) == list(range(6))


def wandb_steps(data):
    """The steps in a file of W&B: a log of protocol buffers in the format of LevelDB."""
    from wandb.proto import wandb_internal_pb2

    steps, at, part = [], 7, b""  # after the header of the file
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if left < 7 or kind == 0:
            at += left
            continue
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            if record.WhichOneof("record_type") == "history":
                values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                steps.append(int(values["_step"]))
    return steps
