"""`niels-gpt generate` and `chat` with a tokenizer: against a greedy loop over ids, and how the tokenizer is found."""

import itertools
import json
import shutil

import pytest

from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import load_model, save_checkpoint
from niels_gpt.tokenizer import SPECIAL_TOKENS
from tests import token_caches
from tests.cli import call, error_of, typed
from tests.inference.models import naive_greedy, text_of
from tests.token_caches import special, tokenizer


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def greedy_text(checkpoint, prompt, amount):
    """Return the text of the ids that follow, until EOT."""
    model, _ = load_model(checkpoint)
    return text_of(naive_greedy(model, prompt, amount, end=special("eot")))


@pytest.mark.parametrize("prompt", ["the model", "so then é again " * 20])  # the second is longer than T
def test_generate(token_checkpoint, capsys, prompt):
    wanted = prompt + greedy_text(token_checkpoint, tokenizer().encode(prompt), 12)
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
    wanted = greedy_text("runs/chat/checkpoints/best.pt", tokenizer().encode("the"), 5)
    assert output == f"the{wanted}\n"


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
    typed(monkeypatch, "".join(line + "\n" for line in lines))
    assert call("chat", "--checkpoint", checkpoint, "--temperature", 0, "--max-tokens", 9) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    return output


def answer(checkpoint, *messages):
    """Return the greedy reply to (role, content) messages, by the template: [role] content [eot], then [asst]."""
    roles = {"system": "sys", "user": "usr", "assistant": "asst"}
    parts = [[special(roles[role]), *tokenizer().encode(text), special("eot")] for role, text in messages]
    return greedy_text(checkpoint, [*itertools.chain(*parts), special("asst")], 9)


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
