"""`niels-gpt doctor`: the facts of the machine, the backends, and what is missing."""

import json
import os
import platform
import shutil

import pytest
import torch

import niels_gpt
from niels_gpt.cli import doctor
from niels_gpt.kernels.cpu import native
from niels_gpt.model import backend, gpt
from niels_gpt.model.backend import BackendRow
from niels_gpt.system import device, machine
from tests.cli import call, error_of

ROWS = [
    BackendRow("plain", "every device", True, "", ("dropout", "segments"), {}),
    BackendRow("fp8", "training on CUDA", False, "no FP8 on cpu: use a Hopper GPU", (), {"segments": "plain does it"}),
]


@pytest.fixture
def fake_backends(monkeypatch):
    asked = []
    monkeypatch.setattr(backend, "backend_report", lambda name: asked.append(name) or ROWS)
    return asked


def test_json(fake_backends, capsys):
    assert call("doctor", "--device", "cpu", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert fake_backends == ["cpu"]
    assert (facts["niels_gpt"], facts["python"]) == (niels_gpt.__version__, platform.python_version())
    assert (facts["torch"], facts["cuda"]) == (torch.__version__, torch.version.cuda)
    assert facts["device"] == "cpu" and facts["devices"][0].startswith("cpu: ")
    assert (facts["threads"], facts["cores"]) == (torch.get_num_threads(), len(os.sched_getaffinity(0)))
    assert facts["backends"][1]["declines"] == {"segments": "plain does it"}
    assert "fp8: no FP8 on cpu: use a Hopper GPU" in facts["missing"]
    assert not any("plain" in line for line in facts["missing"])


def test_text(fake_backends, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "find_compiler", lambda: None)
    assert call("doctor", "--device", "cpu") == 0
    output = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert lines[0] == f"niels-gpt {niels_gpt.__version__}"
    assert "C compiler none" in lines
    assert f"threads {torch.get_num_threads()} of {len(os.sched_getaffinity(0))} cores" in lines
    assert "plain yes every device dropout, segments" in lines
    assert "fp8 no training on CUDA segments: plain does it" in lines
    assert lines[lines.index("missing") + 1 :] == ["fp8: no FP8 on cpu: use a Hopper GPU"]


def test_nothing_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(backend, "backend_report", lambda name: ROWS[:1])
    monkeypatch.setattr(doctor, "find_compiler", lambda: "/usr/bin/gcc")
    monkeypatch.setenv("NIELS_GPT_NATIVE", "/tmp/kernels")
    assert call("doctor", "--device", "cpu") == 0
    assert capsys.readouterr().out.endswith("missing: nothing\n")


def test_the_real_backends_are_listed(capsys):
    assert call("doctor", "--device", "cpu", "--json") == 0
    assert json.loads(capsys.readouterr().out)["backends"][0]["available"] is True


def test_a_device_that_does_not_exist(capsys):
    assert call("doctor", "--device", "abacus") == 1
    assert "abacus" in error_of(capsys)


@pytest.mark.parametrize(
    ("fast", "emulated", "support"),
    [(True, False, "fast"), (False, True, "emulated (slow)"), (False, False, "yes")],
)
def test_support_of_bf16(monkeypatch, fast, emulated, support):
    monkeypatch.setattr(device, "has_fast_bf16", lambda name: fast)
    monkeypatch.setattr(device, "emulates_bf16", lambda name: emulated)
    assert doctor.precision_support("bf16", "cpu") == support
    assert doctor.precision_support("fp32", "cpu") == "yes"
    assert doctor.precision_support("fp8", "cpu").startswith("no: ")


def test_the_compiler_is_that_of_cc_or_gcc_or_cc(monkeypatch):
    installed = {"clang": "/bin/clang", "gcc": "/bin/gcc", "cc": "/bin/cc"}
    monkeypatch.setattr(shutil, "which", installed.get)
    for variable, path in (("clang -m64", "/bin/clang"), ("gone", "/bin/gcc"), ("", "/bin/gcc")):
        monkeypatch.setenv("CC", variable)
        assert doctor.find_compiler() == path
    del installed["gcc"]
    assert doctor.find_compiler() == "/bin/cc"
    installed.clear()
    assert doctor.find_compiler() is None


def test_the_folders_of_compiled_kernels(monkeypatch):
    monkeypatch.setattr(machine, "package_version", lambda package: None)
    for name in ("NIELS_GPT_NATIVE", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert doctor.kernel_folders() == {"C": "/home/someone/.cache/niels-gpt", "Triton": None}
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setattr(machine, "package_version", lambda package: "3.0")
    assert doctor.kernel_folders() == {"C": "/caches/niels-gpt", "Triton": "/home/someone/.triton/cache"}
    monkeypatch.setenv("NIELS_GPT_NATIVE", "~/kernels")
    assert doctor.kernel_folders()["C"] == "/home/someone/kernels"
    monkeypatch.setenv("NIELS_GPT_NATIVE", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/triton")
    assert doctor.kernel_folders() == {"C": None, "Triton": "/triton"}


def test_backends_with_one_reason_share_a_line():
    off = [ROWS[1]._replace(name=name, available=name == "b") for name in ("a", "b")]
    assert doctor.missing([ROWS[0], *off]) == [f"a, b: {ROWS[1].reason}"]


@pytest.fixture
def no_kernels_yet(monkeypatch):
    """No C kernel has been compiled in this process."""
    monkeypatch.setattr(native, "_problems", {})
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.mark.parametrize(("folder", "remedy"), [("0", "unset"), ("kernels", "install gcc")])
def test_missing_c_kernels_are_reported_once(no_kernels_yet, monkeypatch, capsys, tmp_path, folder, remedy):
    monkeypatch.setenv("NIELS_GPT_NATIVE", folder if folder == "0" else str(tmp_path / folder))
    monkeypatch.setattr(native, "find_compiler", lambda: None)
    assert call("doctor", "--device", "cpu", "--json") == 0
    [line] = [line for line in json.loads(capsys.readouterr().out)["missing"] if "kernels" in line or "gcc" in line]
    assert line.startswith("cpu: ") and remedy in line


def test_what_computes_a_model(capsys, monkeypatch):
    """By precision; plain torch by request, and after an edit of the model."""

    def computed_by():
        assert call("doctor", "--device", "cpu", "--json") == 0
        return json.loads(capsys.readouterr().out)["computed_by"]

    assert set(computed_by().values()) == {"cpu"} and "fp32" in computed_by()
    with monkeypatch.context() as patch:
        patch.setattr(gpt.MLP, "forward", lambda self, x: x)
        assert computed_by() == {"all": "plain (model/gpt.py was changed (MLP.forward))"}
    monkeypatch.setenv("NIELS_GPT_BACKEND", "plain")
    assert computed_by() == {"all": "plain (NIELS_GPT_BACKEND=plain)"}
    monkeypatch.setenv("NIELS_GPT_BACKEND", "native")
    assert call("doctor", "--device", "cpu") == 1
    assert "NIELS_GPT_BACKEND must be auto or plain, got 'native'" in error_of(capsys)
