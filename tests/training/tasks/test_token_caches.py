"""What to type if token caches are missing."""

import shlex
from pathlib import Path

import pytest

from niels_gpt.config.yaml_file import config_from_dict
from niels_gpt.training.tasks.token_caches import build_command


def words(tree: dict, *names: str) -> list[str]:
    tree = {"task": "pretrain", "data": {"token_cache": "my caches", "roam": "my notes"}, **tree}
    return shlex.split(build_command(config_from_dict(tree), names))[1:]


def test_all_sources_of_a_config():
    found = words({"train": {"p_train": {"roam": 0.5, "wikitext": 0.5, "gutenberg": 0.0}, "p_val": {"roam": 1.0}}})
    assert found[:2] == ["cache", "build-all"]
    assert found[2:] == ["--only", "roam", "--only", "wikitext", "--notes", "my notes", "--cache-dir", "my caches"]


def test_single_sources():
    assert words({}, "roam") == ["cache", "build", "roam", "--path", "my notes", "--cache-dir", "my caches"]
    assert words({}, "dolly15k", "oasst1") == ["cache", "build", "dolly15k", "oasst1", "--cache-dir", "my caches"]
    assert words({}, "roam", "oasst1")[:2] == ["cache", "build-all"]


@pytest.mark.parametrize("data", [{"sources": {"mine": {"path": "m"}}}, {"notes": {"exclude": ["a"]}}])
def test_options_that_only_a_config_has(data):
    assert "--config" in words({"data": data}, "mine")


def test_a_base_that_is_gone(tmp_path: Path):
    assert "--tokenizer" not in words({"init_from": str(tmp_path / "gone.pt")})
