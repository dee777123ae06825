"""`niels-gpt generate` and `chat` with a tokenizer: against a greedy loop over ids, and how the tokenizer is found."""

import io
import itertools
import json
import shutil
import sys

import pytest
import torch

from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import load_model, save_checkpoint
from niels_gpt.tokenizer import SPECIAL_TOKENS
from tests import token_caches
from tests.cli import call, error_of
from tests.token_caches import special, tokenizer


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def greedy(model, prompt, amount):
    """Return the ids that follow, until EOT."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(amount):
            ids.append(int(model(torch.tensor([ids[-model.config.T :]]))[0, -1].argmax()))
            if ids[-1] == special("eot"):
                return ids[len(prompt) : -1]
    return ids[len(prompt) :]


def decoded(ids):
    return b"".join(tokenizer().token_bytes[i] for i in ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("prompt", ["the model", "so then é again " * 20])  # the second is longer than T
def test_generate(token_checkpoint, capsys, prompt):
    model, _ = load_model(token_checkpoint)
    wanted = prompt + decoded(greedy(model, tokenizer().encode(prompt), 12))
    for cache in ("--cache", "--no-cache"):
        given = ["--checkpoint", token_checkpoint, "--max-tokens", 12, "--temperature", 0, cache]
        assert call("generate", prompt, *given) == 0
        assert capsys.readouterr() == (wanted + "\n", "")
    assert call("generate", prompt, *given, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"checkpoint": str(token_checkpoint), "prompt": prompt, "texts": [wanted]}


def test_a_run_needs_no_caches(token_runs, capsys, tmp_path):
    """Its tokenizer is in its folder."""
    shutil.copytree(token_runs / "runs/chat", tmp_path / "runs/chat")
    assert call("generate", "the", "--max-tokens", 5, "--temperature", 0) == 0
    output, errors = capsys.readouterr()
    assert errors == "using runs/chat\n"
    model, _ = load_model("runs/chat/checkpoints/best.pt")
    assert output == "the" + decoded(greedy(model, tokenizer().encode("the"), 5)) + "\n"


# --- which tokenizer ---------------------------------------------------------------------------------

COMMAND = ["generate", "the", "--max-tokens", 3, "--temperature", 0]


def test_tokenizers_that_are_missing_or_wrong(token_checkpoint, tmp_path, capsys):
    alone = shutil.copy(token_checkpoint, tmp_path / "alone.pt")  # with no tokenizer near it
    assert call(*COMMAND, "--checkpoint", alone) == 1
    message = error_of(capsys)
    assert all(fact in message for fact in (str(alone), "404", "--tokenizer"))
    (tmp_path / "noise.model").write_bytes(b"no tokenizer")
    for name in ("gone.model", "noise.model"):
        assert call(*COMMAND, "--checkpoint", alone, "--tokenizer", name) == 1
        assert name in error_of(capsys)
    model = GPT({"V": 300, "T": 8, "C": 8, "L": 1, "H": 1})
    save_checkpoint(tmp_path / "m.pt", model, None, 1, model.config)
    assert call(*COMMAND, "--checkpoint", "m.pt", "--tokenizer", token_caches.folder() / "tokenizer") == 1
    message = error_of(capsys)
    assert "404" in message and "300" in message


# --- chat --------------------------------------------------------------------------------------------


def chat(monkeypatch, capsys, checkpoint, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    assert call("chat", "--checkpoint", checkpoint, "--temperature", 0, "--max-tokens", 9) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    return output


def answer(checkpoint, *messages):
    """Return the greedy reply to (role, content) messages, by the template: [role] content [eot], then [asst]."""
    model, _ = load_model(checkpoint)
    roles = {"system": "sys", "user": "usr", "assistant": "asst"}
    parts = [[special(roles[role]), *tokenizer().encode(text), special("eot")] for role, text in messages]
    return decoded(greedy(model, [*itertools.chain(*parts), special("asst")], 9))


def test_a_conversation(token_checkpoint, monkeypatch, capsys):
    first = answer(token_checkpoint, ("user", "the model"))
    second = answer(token_checkpoint, ("user", "the model"), ("assistant", first.strip()), ("user", "so é"))
    output = chat(monkeypatch, capsys, token_checkpoint, f"hi {SPECIAL_TOKENS[2]}", "the model", "", "  so é ")
    refused, _, replies = output.partition("\n")
    assert "refused" in refused and SPECIAL_TOKENS[2] in refused
    assert replies == f"niels> {first}\nniels> {second}\n"
    assert first != second
    like_a_turn = answer(token_checkpoint, ("user", "assistant: the note"))  # with a tokenizer this is plain text
    assert chat(monkeypatch, capsys, token_checkpoint, "assistant: the note") == f"niels> {like_a_turn}\n"
