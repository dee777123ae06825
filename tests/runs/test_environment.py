"""environment.json: what a run records of its commands, its machine and its data."""

import json

import pytest

from niels_gpt.runs.environment import FILE, read_environment, recorded_session
from niels_gpt.system import program

MACHINE = {"torch": "2.9.0", "device": "cpu", "devices": ["cpu: Abacus"]}
DATA = [{"source": "roam", "train": 12}]


def start(run, step=0, **options):
    given = {"processes": 1, "machine": MACHINE, "data": DATA, "fingerprint": {"roam": "ab"}, **options}
    return recorded_session(run, step=step, **given)


def test_a_session_has_its_command_and_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "_arguments", ("train", "--notes", "my notes"))
    with start(tmp_path) as session:
        running = read_environment(tmp_path).sessions[0]
        session.steps, session.outcome = 7, "finished"
    found = read_environment(tmp_path)
    assert (running.ended, running.outcome) == (None, None)
    [ended] = found.sessions
    assert ended.command == "niels-gpt train --notes 'my notes'"
    assert (ended.outcome, ended.steps, ended.machine) == ("finished", 7, MACHINE)
    assert ended.ended >= ended.started
    assert (found.data, found.fingerprint) == (DATA, {"roam": "ab"})


def test_a_resumed_run_has_a_session_per_start(tmp_path):
    for step in (0, 5):
        with start(tmp_path, step) as session:
            session.steps = step + 5
    assert [(s.step, s.steps) for s in read_environment(tmp_path).sessions] == [(0, 5), (5, 10)]


def test_an_error_is_recorded_and_raised(tmp_path):
    with pytest.raises(ValueError, match=r"no\sdisk"), start(tmp_path) as session:
        session.steps = 3
        raise ValueError("no\ndisk") from None
    [session] = read_environment(tmp_path).sessions
    assert (session.outcome, session.reason, session.steps) == ("failed", "no\\ndisk", 3)


def test_a_run_of_an_older_version_has_none(tmp_path):
    assert read_environment(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"sessions": 3}', '{"sessions": [[]], "data": [], "fingerprint": {}}'])
def test_a_damaged_file_is_a_warning(tmp_path, text):
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert read_environment(tmp_path) is None


def test_a_changed_value_is_found(tmp_path):
    with start(tmp_path):
        pass
    stored = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    stored["sessions"][0]["processes"] = 2
    (tmp_path / FILE).write_text(json.dumps(stored), encoding="utf-8")
    with pytest.warns(UserWarning, match="checksum"):
        assert read_environment(tmp_path) is None


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="was not written"), start(tmp_path / "none"):
        pass


def test_other_processes_write_nothing(tmp_path):
    with start(tmp_path, write=False):
        pass
    assert not (tmp_path / FILE).exists()
