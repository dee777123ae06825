"""The vulnerability audit: what it finds, and how it says that it was skipped."""

import json

import pytest

from scripts import audit_dependencies


@pytest.fixture
def tool(tmp_path):
    """Write a program that stands for pip-audit: prints `out` and `err`, and ends with `status`."""

    def write(out="", *, err="", status=0, seconds=0):
        path = tmp_path / "pip-audit"
        path.write_text(
            f"#!/bin/sh\ncp \"$2\" {tmp_path}/pins\nsleep {seconds}\ncat <<'END'\n{out}\nEND\n"
            f"cat >&2 <<'END'\n{err}\nEND\nexit {status}\n",
            encoding="utf-8",
        )
        path.chmod(0o755)
        return str(path)

    return write


def report(*entries):
    return json.dumps({"dependencies": list(entries), "fixes": []})


def run(capsys, tool, *options):
    status = audit_dependencies.main(["--tool", tool, *options])
    return status, capsys.readouterr().out


CLEAN = {"name": "numpy", "version": "2.4.6", "vulns": []}
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}


def test_a_vulnerability_with_a_fix_is_an_error(capsys, tool, tmp_path):
    bad = {"name": "pillow", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": ["1.1", "2.0"]}]}
    status, out = run(capsys, tool(report(CLEAN, bad, UNKNOWN), status=1))
    assert status == 1
    assert out.splitlines()[0] == "error: pillow 1.0: CVE-1: upgrade to 1.1, 2.0"
    assert out.splitlines()[1].startswith("vulnerabilities: 2 dependencies audited, 1 not known to the service, 1 with")
    pins = (tmp_path / "pins").read_text(encoding="utf-8").split()
    assert len(pins) > 50
    assert not any("+" in pin for pin in pins)  # 2.13.0, not 2.13.0+cpu


def test_a_vulnerability_without_a_fix_is_a_warning(capsys, tool):
    bad = {"name": "pillow", "version": "1.0", "vulns": [{"id": "CVE-1", "fix_versions": []}]}
    status, out = run(capsys, tool(report(CLEAN, bad), status=1))
    assert status == 0
    assert out.startswith("warning: pillow 1.0: CVE-1: no version fixes it yet\n")


@pytest.mark.parametrize(
    ("program", "fact"),
    [
        ({"err": "Traceback\nConnectionError: no route", "status": 1}, "not reachable: ConnectionError: no route"),
        ({"status": 1}, "not reachable: exit status 1"),
        ({"out": report(UNKNOWN, UNKNOWN)}, "not found on PyPI"),
        ({"out": report()}, "empty report"),
        ({"out": report(CLEAN), "seconds": 5}, "within 0 s"),
    ],
)
def test_skipped_without_the_service(capsys, tool, program, fact):
    status, out = run(capsys, tool(**program), "--timeout", "0.3" if "seconds" in program else "20")
    assert status == 0
    assert out.startswith("vulnerabilities: skipped: ") and len(out.splitlines()) == 1
    assert fact in out


def test_skipped_without_pip_audit(capsys, tmp_path):
    status, out = run(capsys, str(tmp_path / "absent"))
    assert status == 0
    assert "skipped: pip-audit is not installed" in out and "make tools" in out
