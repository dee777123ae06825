"""One line says what to install, for every Levanter that cannot be used."""

import subprocess
import sys
from importlib import metadata, util

import pytest

INSTALL = "pip install 'niels-gpt[levanter]'"


@pytest.fixture
def check(monkeypatch):
    """Return the message for an environment with these distributions."""
    # The module is loaded without its package, which needs Levanter.
    spec = util.spec_from_file_location(
        "installed", util.find_spec("niels_gpt").submodule_search_locations[0] + "/levanter/installed.py"
    )
    installed = util.module_from_spec(spec)
    spec.loader.exec_module(installed)

    def message(versions, modules=("git",)):
        def version(name):
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(installed.metadata, "version", version)
        monkeypatch.setattr(installed.util, "find_spec", lambda name: object() if name in modules else None)
        try:
            installed.check_levanter()
        except ImportError as err:
            return str(err)
        finally:
            monkeypatch.undo()
        return ""

    return message


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        ({}, "not installed"),
        ({"levanter": "1.1"}, "levanter 1.1"),
        ({"levanter": "1.2.dev1644"}, "levanter 1.2.dev1644"),
        ({"levanter": "1.1", "marin-levanter": "0.2.20.dev202606180959"}, "levanter 1.1"),
        ({"marin-levanter": "0.2.19"}, "0.2.19"),
        ({"marin-levanter": "0.3.0.dev1"}, "0.3.0.dev1"),
    ],
)
def test_a_levanter_that_cannot_be_used_is_one_line_with_the_remedy(check, versions, named):
    message = check(versions)
    assert named in message and INSTALL in message and "\n" not in message


def test_the_pinned_version_and_later_ones_of_its_generation_are_accepted(check):
    assert check({"marin-levanter": "0.2.20.dev202606180959"}) == ""
    assert check({"marin-levanter": "0.2.21"}) == ""


def test_a_missing_gitpython_is_named(check):
    assert "gitpython" in check({"marin-levanter": "0.2.20"}, modules=())


@pytest.mark.skipif(util.find_spec("levanter") is not None, reason="Levanter is installed")
def test_import_without_the_extra_raises_an_import_error():
    with pytest.raises(ImportError, match="not installed") as raised:
        import niels_gpt.levanter  # noqa: F401
    assert INSTALL in str(raised.value)


def test_the_rest_of_the_package_imports_no_jax():
    code = "import niels_gpt, niels_gpt.splice, niels_gpt.cli.main, sys; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
