"""The hash-pinned requirements: which files count, and that the committed file covers the project."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import lock_requirements
from scripts.dependencies import own_requirements
from scripts.lock_requirements import BUILD, LOCKED, is_supported, lock
from scripts.sbom import locked_hashes


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("rich-15.0.0-py3-none-any.whl", True),
        ("six-1.0-py2.py3-none-any.whl", True),
        ("numpy-2.4.6-cp312-cp312-macosx_14_0_arm64.whl", True),
        ("numpy-2.4.6-cp311-cp311-manylinux_2_27_aarch64.manylinux_2_28_aarch64.whl", True),
        ("safetensors-0.8.0-cp38-abi3-manylinux_2_17_x86_64.whl", True),
        ("numpy-2.4.6-cp311-cp311-win_amd64.whl", False),
        ("numpy-2.4.6-cp39-cp39-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.4.6-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.4.6-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.4.6.tar.gz", False),
    ],
)
def test_wheels_of_supported_pythons_and_platforms(filename, expected):
    assert is_supported(filename) is expected


def entry(name, version, digest):
    archive = {"archive_info": {"hashes": {"sha256": digest}}}
    return {"metadata": {"name": name, "version": version}, "download_info": archive}


def test_the_wheel_that_pip_chose_is_among_the_hashes_and_replaces_those_of_linux():
    report = {
        "environment": {"python_version": "3.11", "platform_system": "Linux", "platform_machine": "aarch64"},
        "install": [entry("torch", "2.13.0+cpu", "c" * 64), entry("Jinja2", "3.1.6", "b" * 64)],
    }
    asked = []

    def files(name, version):
        asked.append((name, version))
        names = {
            "a": "cp311-cp311-macosx_14_0_arm64.whl",
            "e": "cp311-cp311-manylinux_2_28_aarch64.whl",
            "d": "x.tar.gz",
        }
        return [
            {"filename": f"{name}-{version}-{rest}", "digests": {"sha256": digest * 64}}
            for digest, rest in names.items()
        ]

    text = lock(report, files)
    assert asked == [("jinja2", "3.1.6"), ("torch", "2.13.0")]
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        "jinja2==3.1.6 \\",
        f"    --hash=sha256:{'a' * 64} \\",
        f"    --hash=sha256:{'b' * 64} \\",
        f"    --hash=sha256:{'e' * 64}",
        "torch==2.13.0 \\",
        f"    --hash=sha256:{'a' * 64} \\",
        f"    --hash=sha256:{'c' * 64}",
    ]
    assert locked_hashes(text) == {
        ("jinja2", "3.1.6"): ["a" * 64, "b" * 64, "e" * 64],
        ("torch", "2.13.0"): ["a" * 64, "c" * 64],
    }


def test_an_unreachable_index_is_one_line(monkeypatch, capsys, tmp_path):
    def fail(requirements):
        raise OSError("no route")

    monkeypatch.setattr(lock_requirements, "resolve", fail)
    output = tmp_path / "locked.txt"
    assert lock_requirements.main(["--output", str(output)]) == 1
    assert "no route" in capsys.readouterr().err and not output.exists()


def test_the_committed_file_covers_what_the_project_requires():
    text = LOCKED.read_text(encoding="utf-8")
    pins = locked_hashes(text).keys()
    versions = dict(pins)
    assert len(versions) == len(pins) == len(re.findall(r"^\w\S*==", text, re.MULTILINE))
    for line in (*own_requirements(), *BUILD):
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(versions[name]), f"{line}: {versions.get(name)}; run make lock"
    constraints = (Path(LOCKED).parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for line in (line for line in constraints if line and not line.startswith("#")):
        assert Requirement(line).specifier.contains(versions[Requirement(line).name]), "run make lock"
