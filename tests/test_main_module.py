"""`python -m niels_gpt` and the script `niels-gpt`: Ctrl-C is quiet from the first import to the end."""

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CTRL_C = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)\n"
SCRIPT = "import sys\nfrom niels_gpt.__main__ import main\nsys.exit(main())\n"


def run(tmp_path, *command, ignored=False):
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    handler = signal.SIG_IGN if ignored else signal.default_int_handler
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )


@pytest.mark.parametrize("command", [["-m", "niels_gpt", "data", "list"], ["-c", SCRIPT, "data", "list"]])
@pytest.mark.parametrize("module", ["typer", "yaml"])  # imported with the commands, and by a command
def test_ctrl_c_during_an_import(tmp_path, command, module):
    (tmp_path / f"{module}.py").write_text(CTRL_C, encoding="utf-8")
    if module == "yaml":
        command = [*command[:-2], "config", "show", "debug"]
    done = run(tmp_path, *command)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_library_cannot_swallow_it(tmp_path):
    (tmp_path / "typer.py").write_text(
        "try:\n    " + CTRL_C.replace("\n", "\n    ") + "\nexcept KeyboardInterrupt:\n    pass\n", encoding="utf-8"
    )
    assert run(tmp_path, "-m", "niels_gpt", "data", "list").returncode == 130


def test_ctrl_c_while_python_exits(tmp_path):
    code = "import atexit\n" + SCRIPT.replace("sys.exit", f"atexit.register(lambda: exec({CTRL_C!r}))\nsys.exit")
    done = run(tmp_path, "-c", code, "--version")
    assert done.returncode == -signal.SIGINT and done.stderr == ""  # 130 in a shell


def test_a_background_job_goes_on_ignoring_it(tmp_path):
    (tmp_path / "typer.py").write_text(
        "import os\nos.kill(os.getpid(), 2)\nraise OSError('went on')\n", encoding="utf-8"
    )
    done = run(tmp_path, "-m", "niels_gpt", "--version", ignored=True)
    assert "went on" in done.stderr


def test_the_script_starts_in_the_module_that_handles_it():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"niels-gpt": "niels_gpt.__main__:main"}
