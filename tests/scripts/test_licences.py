"""The list of licences: names in metadata, SPDX expressions, and what is refused."""

import email

import pytest

from scripts import dependencies, licences


class Fake:
    """A distribution with this metadata."""

    def __init__(self, *lines, version="1.0", requires=()):
        self.metadata = email.message_from_string("\n".join(lines) + "\n")
        self.version, self.requires = version, list(requires)


@pytest.fixture
def installed(monkeypatch):
    """Replace the installed distributions and the requirements of the project."""

    def install(requirements, **distributions):
        def find(name):
            if name not in distributions:
                raise dependencies.PackageNotFoundError(name)
            return distributions[name]

        monkeypatch.setattr(dependencies, "distribution", find)
        monkeypatch.setattr(licences, "own_requirements", lambda extras: requirements)

    return install


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["License-Expression: MIT OR GPL-3.0", "License: else"], "MIT OR GPL-3.0"),
        (["Classifier: License :: OSI Approved :: Apache Software License"], "Apache-2.0"),
        (["Classifier: License :: OSI Approved", "License: BSD 3-Clause License"], "BSD-3-Clause"),
        (["Classifier: License :: OSI Approved :: MIT License", "License: long text"], "MIT"),
        (["License: Apache License, Version 2.0"], "Apache-2.0"),
        (["License: Apache 2.0 License"], "Apache-2.0"),
        (["License: GPLv3"], "GPLv3"),
        (["License: UNKNOWN"], "unknown"),
        (["Name: bare"], "unknown"),
    ],
)
def test_licence_of_metadata(lines, expected):
    assert licences.licence_of(Fake(*lines)) == expected


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("MIT AND GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("GPL-3.0-only OR AGPL-3.0-only", False),
        ("(MIT OR GPL-3.0-only) AND BSD-3-Clause", True),
        ("MIT AND (BSD-3-Clause AND GPL-3.0-only)", False),
        ("GPL-3.0-only AND MIT OR Apache-2.0", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", False),
        ("MIT License, see the file", False),
        ("(MIT", False),
        ("MIT )", False),
        ("MIT AND", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_an_expression_is_satisfied_by_allowed_licences(expression, allowed):
    assert licences.is_allowed(expression) is allowed


def test_a_licence_in_the_closure_that_is_not_allowed_fails(installed, capsys):
    installed(
        ["direct[fast]>=1"],
        direct=Fake("License-Expression: MIT", requires=["behind", 'quick; extra == "fast"', 'other; extra == "slow"']),
        behind=Fake("License-Expression: ISC", requires=["direct", 'never; python_version < "3"']),
        quick=Fake("License-Expression: GPL-3.0-only", version="2.1"),
    )
    assert licences.main([]) == 1
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()[:-1]] == [
        ["behind", "1.0", "ISC"],
        ["direct", "1.0", "MIT"],
        ["quick", "2.1", "GPL-3.0-only"],
    ]
    assert len(err.splitlines()) == 1
    for fact in ("quick 2.1", "GPL-3.0-only", "ALLOWED"):
        assert fact in err


def test_cuda_packages_are_accepted_and_missing_ones_are_not(installed, capsys):
    installed(["nvidia-cudnn", "absent"], **{"nvidia-cudnn": Fake("License: NVIDIA Proprietary Software")})
    assert licences.main(["--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == "licences: 1 dependencies, 0 with a licence that is not allowed\n"
    assert "absent" in err and "nvidia" not in err


def test_the_dependencies_of_this_project_are_allowed(capsys):
    assert licences.main([]) == 0, capsys.readouterr().err
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {"torch", "numpy", "datasets", "huggingface-hub", "pytest", "markupsafe"} <= listed
    assert licences.main(["--extra", "dev", "--quiet"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
