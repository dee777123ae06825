"""The list of runs for a program that asks again and again: states, ids, damage, and how often files are read."""

import dataclasses
import fcntl
import os
import threading
import time

import pytest

from niels_gpt.runs import info
from niels_gpt.runs.environment import Environment, Session
from niels_gpt.runs.folder import RunFolder
from niels_gpt.serve import runs_routes
from niels_gpt.serve.errors import APIError
from niels_gpt.serve.runs_routes import RunsReader, identifier_of
from niels_gpt.system import files
from niels_gpt.system.checked_json import write_checked_json
from tests.runs.test_catalog import make_run


@pytest.fixture(autouse=True)
def list_at_once(monkeypatch):
    monkeypatch.setattr(runs_routes, "LIST_SECONDS", 0.0)
    monkeypatch.setattr(runs_routes, "REST", 0)


def states(watched):
    return {run.name: run.state if run.failure is None else "failed" for run in watched.all()}


def session(path, outcome, reason=""):
    """Record a session that ended so; None: a kill."""
    made = Session(0, "2026-01-02T03:04:05+00:00", None, "/", 1, {}, outcome=outcome, reason=reason)
    write_checked_json(path / "environment.json", dataclasses.asdict(Environment([made])))


def test_states(tmp_path):
    make_run(tmp_path / "finished", steps=10)
    make_run(tmp_path / "stopped")
    session(make_run(tmp_path / "diverged"), "diverged", "the loss became nan")
    session(make_run(tmp_path / "a" / "failed"), "failed")
    session(make_run(tmp_path / "killed"), None)
    make_run(tmp_path / "damaged")
    (tmp_path / "damaged" / "config.yaml").write_text("{{", encoding="utf-8")
    watched = RunsReader(tmp_path)
    assert states(watched) == {
        "finished": "finished",
        "stopped": "stopped",
        "killed": "stopped",
        "diverged": "failed",
        "a/failed": "failed",
        "damaged": "failed",
    }
    problems = {run.name: run.failure for run in watched.all()}
    assert problems["diverged"] == "the loss became nan" and problems["a/failed"] == "failed"
    assert "YAML" in problems["damaged"] and problems["stopped"] is None


def test_a_run_that_trains_and_stops(tmp_path):
    run = make_run(tmp_path / "a")
    watched = RunsReader(tmp_path)
    [first] = watched.all()
    assert first.state == "stopped"
    with RunFolder(run).lock():
        assert states(watched) == {"a": "training"} and watched.run(identifier_of(first.name)).state == "training"
    assert states(watched) == {"a": "stopped"} and watched.run(identifier_of(first.name)).state == "stopped"


@pytest.mark.parametrize(("seconds", "starts"), [(0.1, True), (1.0, False)])
def test_a_run_starts_although_a_reader_holds_its_lock_for_an_instant(tmp_path, seconds, starts):
    run = make_run(tmp_path / "a")
    with (run / "run.lock").open("wb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)  # as `is_locked` does
        release = threading.Timer(seconds, fcntl.flock, (reader, fcntl.LOCK_UN))
        release.start()
        try:
            if starts:
                with RunFolder(run).lock():
                    assert files.is_locked(run / "run.lock")
            else:
                with pytest.raises(ValueError, match="another process is training"), RunFolder(run).lock():
                    pytest.fail("the run was locked twice")
        finally:
            release.join()


def test_two_readers_do_not_look_like_training(tmp_path):
    path = tmp_path / "run.lock"
    path.touch()
    found = []

    def ask():
        found.extend(files.is_locked(path) for _ in range(300))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [False] * 1200


def test_an_id_is_no_path_and_stays_the_same(tmp_path):
    make_run(tmp_path / "x" / "y..")
    make_run(tmp_path / "b")
    ids = {run.name: identifier_of(run.name) for run in RunsReader(tmp_path).all()}
    assert set(ids) == {"x/y..", "b"}
    assert all(len(value) == 16 and set(value) <= set("0123456789abcdef") for value in ids.values())
    assert {run.name: identifier_of(run.name) for run in RunsReader(tmp_path).all()} == ids
    watched = RunsReader(tmp_path)
    for wrong in ("b", "..", "../b", "", "0" * 16, str(tmp_path / "b")):
        with pytest.raises(APIError, match="no run"):
            watched.run(wrong)


def test_damaged_empty_strange_and_unfinished_folders_do_not_break_the_list(tmp_path):
    good = make_run(tmp_path / "good")
    for name in ("empty", "strange"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "strange" / "metrics.jsonl").mkdir()
    (tmp_path / "strange" / "run.lock").touch()
    os.mkfifo(tmp_path / "strange" / "config.yaml")  # reading it would wait for ever
    torn = make_run(tmp_path / "torn")
    with (torn / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "lo')
    (tmp_path / os.fsdecode(b"not-utf8-\xff")).mkdir()
    (tmp_path / os.fsdecode(b"not-utf8-\xff") / "run.lock").touch()
    (tmp_path / "linked").symlink_to(good)
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.warns(UserWarning, match="incomplete last line"):
        found = states(RunsReader(tmp_path))
    assert found == {"good": "stopped", "torn": "stopped", "strange": "failed", os.fsdecode(b"not-utf8-\xff"): "failed"}


def test_a_run_that_disappears(tmp_path):
    run = make_run(tmp_path / "a")
    watched = RunsReader(tmp_path)
    [listed] = watched.all()
    run.rename(tmp_path / ".gone")
    with pytest.raises(APIError, match="no run"):
        watched.run(identifier_of(listed.name))
    assert watched.all() == []
    assert RunsReader(tmp_path / "nowhere").all() == []


def test_only_changed_runs_are_read_again(tmp_path, monkeypatch):
    for name in ("a", "b"):
        make_run(tmp_path / name)
    read = []
    real = info.read_tree
    monkeypatch.setattr(info, "read_tree", lambda path: read.append(path.name) or real(path))
    watched = RunsReader(tmp_path)
    watched.all()
    assert sorted(read) == ["a", "b"]
    watched.all()
    with (tmp_path / "a" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss": 1.0}\n')
    runs = {run.name: run for run in watched.all()}
    assert read[2:] == ["a"] and runs["a"].steps == 4
    monkeypatch.setattr(runs_routes, "REST", 10**6)  # a long file: its summary is used for a while
    for step in (4, 5):
        time.sleep(0.01)
        with (tmp_path / "a" / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(f'{{"step": {step}, "loss": 1.0}}\n')
        watched.all()
    assert read[2:] == ["a", "a"]


def test_curves_of_many_runs_keep_a_few_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_routes, "FOLLOWED", 2)
    for name in "abc":
        make_run(tmp_path / name)
    watched = RunsReader(tmp_path)
    for run in watched.all() * 2:
        assert watched.curves(run, after=-1, version="")["points"]["loss"] == [5.0, 4.0, 3.0]
    assert watched._follower.cache_info().currsize == 2
