"""The config of a run on disk: edits stay possible and are reported; so is damage."""

import dataclasses
import warnings

import pytest

from niels_gpt.config import RunConfig
from niels_gpt.runs.info import read_tree
from niels_gpt.runs.stored_config import copy_path, read_stored_config, write_stored_config
from tests.faults import flipped


@pytest.fixture
def path(tmp_path):
    write_stored_config(tmp_path / "config.yaml", RunConfig())
    return tmp_path / "config.yaml"


def quietly(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return read_stored_config(path)


def test_an_unchanged_config_gives_no_warning(path):
    config = quietly(path)
    write_stored_config(path, config)
    assert quietly(path) == config
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_tree(path.parent)
        copy_path(path).unlink()  # a run of an older version
        read_tree(path.parent)
    assert quietly(path) == config


def test_an_edit_is_used_and_reported_with_its_keys(path):
    text = path.read_text(encoding="utf-8")
    old = read_stored_config(path).output
    path.write_text(text.replace(f"eval_every: {old.eval_every}", "eval_every: 7"), encoding="utf-8")
    message = rf"config\.yaml has changed since it was written: output\.eval_every was {old.eval_every}, is 7$"
    with pytest.warns(UserWarning, match=message):
        assert read_stored_config(path).output == dataclasses.replace(old, eval_every=7)
    with pytest.warns(UserWarning, match=message):
        read_tree(path.parent)
    with pytest.warns(UserWarning, match=message):
        write_stored_config(path, read_stored_config(path))
    assert quietly(path).output.eval_every == 7


def test_a_damaged_copy_is_reported(path):
    copy_path(path).write_bytes(copy_path(path).read_bytes().replace(b"eval_every", b"eval_evere"))
    with pytest.warns(UserWarning, match=r"\.config\.yaml\.json is damaged .*cannot tell whether .*config\.yaml"):
        assert read_stored_config(path) is not None


@pytest.mark.parametrize("which", ["config", "copy"])
def test_no_flipped_bit_changes_a_value_in_silence(path, which):
    intact = read_stored_config(path)
    file = path if which == "config" else copy_path(path)
    for damaged in flipped(file.read_bytes()):
        file.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                assert read_stored_config(path) == intact or caught
            except ValueError:
                continue
