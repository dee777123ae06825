"""The public model that a run began with: from a folder, or from a repository in the cache of the Hub."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from niels_gpt.config import ModelConfig, RunConfig
from niels_gpt.export.hugging_face import write_hf
from niels_gpt.model.gpt import GPT
from niels_gpt.pretrained.find_model import find_folder
from niels_gpt.pretrained.public_base import PRIVATE_TEXT, PublicBase, public_base, record_base
from niels_gpt.runs.folder import RunFolder
from niels_gpt.tokenizer import ByteTokenizer

NAME = "somebody/tiny-llama"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the Hub with one repository, as a download leaves it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}"
    folder = repository / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({PRIVATE_TEXT: True}))
    return folder


def run_from(init_from: str) -> RunFolder:
    run = RunFolder(Path("run"))
    run.path.mkdir()
    run.write_config(RunConfig(model=ModelConfig(T=16, C=16, L=1, H=2), init_from=init_from))
    return run


def test_a_repository_is_read_from_the_cache_of_the_hub(hub_cache: Path) -> None:
    assert public_base(run_from(f"hf:{NAME}")) == PublicBase(NAME, "mit", private_text=True)


def test_what_a_run_recorded_counts_after_the_model_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    sizes = {"V": 256, "T": 16, "C": 16, "L": 1, "H": 2, "norm": "rmsnorm", "mlp": "swiglu"}
    write_hf(GPT(sizes), ByteTokenizer(), Path("model"), private_text=True)
    Path("model", "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    run = run_from("hf:model")
    record_base(run, "hf:model")
    shutil.rmtree("model")
    assert public_base(run) == PublicBase("model", "mit", private_text=True)
    run.release()
    assert public_base(run) is None


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize("content", ["", "{}", '{"name": "x"'])
def test_a_damaged_record_may_hide_private_text(
    content: str, imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_from("" if imported else "hf:model")
    path = run.source_path if imported else run.base_source_path
    path.write_text(content)
    base = public_base(run)
    assert base is not None
    assert (base.private_text, base.damaged) == (True, str(path))


def test_a_repository_that_is_not_in_the_cache_has_a_name(hub_cache: Path) -> None:
    assert public_base(run_from("hf:somebody/other")) == PublicBase("somebody/other", "")


def test_a_full_disk_is_not_a_missing_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(OSError, match="No space left") as caught:
        find_folder(NAME)
    assert caught.value.errno == errno.ENOSPC
