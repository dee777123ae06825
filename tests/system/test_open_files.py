"""The limit of open files: raised where that is allowed, named where it is reached."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from niels_gpt.system import console, open_files


def run(code, soft, hard):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    ).stdout.strip()


@pytest.mark.parametrize(("soft", "hard", "raised"), [(50, 900, 900), (900, 900, 900)])
def test_the_soft_limit_is_raised_to_the_hard_one(soft, hard, raised):
    code = (
        "import resource\nfrom niels_gpt.system import open_files\nopen_files.raise_limit()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert run(code, soft, hard) == str((raised, hard))


def test_a_command_opens_more_files_than_the_soft_limit(tmp_path):
    code = (
        "from niels_gpt.cli.run_app import run_app\n"
        f"def app(**_): print(len([open('{tmp_path}/' + str(i), 'w') for i in range(200)]))\n"
        "run_app(app, [], name='x')"
    )
    assert run(code, 50, 400) == "200"


@pytest.mark.parametrize(("limit", "needs"), [(40, "at least 256"), (1024, "e.g. 4,096")])
def test_the_error_names_the_limit_and_the_need(monkeypatch, limit, needs):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    err = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "notes/a.md")
    message = console.error_message(err)
    assert message.startswith("cannot open notes/a.md: Too many open files: ")
    assert f"{limit:,} files (ulimit -n)" in message and needs in message and "raise it" in message
    assert open_files.remedy(OSError(errno.ENOENT, "x")) == ""
    assert "file-max" in open_files.remedy(OSError(errno.ENFILE, "x"))
