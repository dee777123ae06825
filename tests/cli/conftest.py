"""Runs that several test files share: one that recites notes, and two on token caches."""

import shutil

import pytest
import torch

from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from tests import token_caches
from tests.cli import call, reciting

SHARES = {"pretrain": "train.p_train={fineweb_edu: 0.5, roam: 0.5}", "sft": "train.p_train={oasst1: 0.5, primer: 0.5}"}


def token_options(task, *overrides):
    """Return options of `train` for a small run on token caches."""
    fast = [*token_caches.SMALL, "train.total_steps=4", "train.warmup_steps=0", SHARES[task]]
    return token_caches.options([f"task={task}", *fast, *overrides])


@pytest.fixture(scope="session")
def token_runs(tmp_path_factory):
    """A folder with `cache/` and two runs: runs/base was pretrained, runs/chat was tuned from it. Read-only."""
    folder = tmp_path_factory.mktemp("token-runs")
    token_caches.copy_to(folder / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call("train", *token_options("pretrain"), "--run-dir", "runs/base") == 0
        tuned = token_options("sft", "init_from=runs/base/checkpoints/best.pt")
        assert call("train", *tuned, "--run-dir", "runs/chat") == 0
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A byte model with large random weights: it writes letters, and each depends on all it reads."""
    torch.manual_seed(3)
    model = GPT({"T": 96, "C": 32, "L": 1, "H": 2, "dropout": 0.0})
    letters = list(b"abcdefgh ")
    with torch.no_grad():
        model.tok_emb.weight[letters] = torch.randn(len(letters), 32)
    return _save_with_large_weights(model, tmp_path_factory.mktemp("model") / "m.pt")


@pytest.fixture(scope="session")
def token_checkpoint(tmp_path_factory):
    """The same with a tokenizer, which is in the folder above as in a run. It writes whole characters and no turns."""
    torch.manual_seed(5)
    model = GPT({"V": 404, "T": 64, "C": 32, "L": 1, "H": 2, "dropout": 0.0})
    tokenizer = token_caches.tokenizer()
    rare = [i for i, data in enumerate(tokenizer.token_bytes) if len(data) == 1 and data >= b"\x80"]
    rare += [token_caches.special(name) for name in ("sys", "usr", "asst")]
    with torch.no_grad():
        model.tok_emb.weight.normal_()
        model.tok_emb.weight[rare] *= 0.01  # the head shares this matrix
    folder = tmp_path_factory.mktemp("token-model")
    shutil.copy(token_caches.folder() / "tokenizer/spm.model", folder / "tokenizer.model")
    return _save_with_large_weights(model, folder / "checkpoints" / "m.pt")


def _save_with_large_weights(model, path):
    with torch.no_grad():
        for weight in model.blocks.parameters():
            if weight.dim() == 2:
                weight *= 60
    save_checkpoint(path, model, None, 5, model.config)
    return path


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder to work in, and one thread: these models are small."""
    monkeypatch.chdir(tmp_path)
    with reciting.one_thread():
        yield


@pytest.fixture(scope="module")
def place():
    """`notes/`, and `run/`, which recites two of them."""
    return reciting.folder()


@pytest.fixture(scope="module")
def trained(place):
    """The names of the notes that the run was trained on."""
    return reciting.longest(reciting.split(place / "notes")[0], 2)
