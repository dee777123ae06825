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

PROMPTS = ["the model", "é", "so then and again " * 20]


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


@pytest.mark.parametrize("prompt", PROMPTS)
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


def test_the_text_depends_on_the_prompt_and_the_seed(token_checkpoint, capsys):
    """Without this the other tests would prove little."""
    model, _ = load_model(token_checkpoint)
    assert len({decoded(greedy(model, tokenizer().encode(prompt), 12)) for prompt in PROMPTS}) == 3
    outputs = []
    for seed in (1, 1, 2):
        assert call("generate", "the", "--checkpoint", token_checkpoint, "--max-tokens", 20, "--seed", seed) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_several_texts_and_stops(token_checkpoint, capsys):
    model, _ = load_model(token_checkpoint)
    free = decoded(greedy(model, tokenizer().encode("the model"), 12))
    stop = free[len(free) // 2 :][:2]
    given = ["--checkpoint", token_checkpoint, "--max-tokens", 12, "--temperature", 0]
    assert call("generate", "the model", *given, "--stop", stop) == 0
    assert capsys.readouterr().out == "the model" + free[: free.index(stop)] + "\n"
    assert call("generate", "the model", *given, "-n", 2) == 0
    assert capsys.readouterr().out == "".join(f"--- {i} of 2\nthe model{free}\n" for i in (1, 2))


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


@pytest.fixture
def alone(token_checkpoint, tmp_path):
    """The checkpoint, with no tokenizer near it."""
    path = tmp_path / "somewhere" / "below" / "m.pt"
    path.parent.mkdir(parents=True)
    shutil.copy(token_checkpoint, path)
    return path


@pytest.mark.parametrize("above", [".", ".."])
def test_the_tokenizer_is_found_beside_the_checkpoint_or_above(alone, capsys, above):
    model = token_caches.folder() / "tokenizer/spm.model"
    shutil.copy(model, alone.parent / above / "tokenizer.model")
    assert call(*COMMAND, "--checkpoint", alone) == 0
    found = capsys.readouterr()
    assert found.err == ""
    for given in (model, model.parent):
        assert call(*COMMAND, "--checkpoint", alone, "--tokenizer", given) == 0
        assert capsys.readouterr() == found


def test_tokenizers_that_are_missing_or_wrong(alone, tmp_path, capsys):
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


def chat(monkeypatch, capsys, checkpoint, *lines, given=()):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    assert call("chat", "--checkpoint", checkpoint, "--temperature", 0, "--max-tokens", 9, *given) == 0
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
    output = chat(monkeypatch, capsys, token_checkpoint, "the model", "", "  so é ")
    assert output == f"niels> {first}\nniels> {second}\n"
    assert first != second
    like_a_turn = answer(token_checkpoint, ("user", "assistant: the note"))  # with a tokenizer this is plain text
    assert chat(monkeypatch, capsys, token_checkpoint, "assistant: the note") == f"niels> {like_a_turn}\n"


def test_system_and_reset(token_checkpoint, monkeypatch, capsys):
    with_system = answer(token_checkpoint, ("system", "be small"), ("user", "the note"))
    without = answer(token_checkpoint, ("user", "the note"))
    assert with_system != without
    lines = ["/system be small", "the note", "/reset", "/system", "the note"]
    replies = [text for text in chat(monkeypatch, capsys, token_checkpoint, *lines).splitlines() if text[0] != "("]
    assert replies == [f"niels> {with_system}", f"niels> {without}"]


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_special_strings_are_refused_and_not_remembered(token_checkpoint, monkeypatch, capsys, token):
    first = answer(token_checkpoint, ("user", "the note"))
    output = chat(monkeypatch, capsys, token_checkpoint, f"hi {token}", f"/system {token}", "the note")
    assert output.count("refused") == 2
    assert output.endswith(f"niels> {first}\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the note\n"))
    assert call("chat", "--checkpoint", token_checkpoint, "--system", f"x {token}") == 1
    assert token in error_of(capsys)


def test_a_reply_ends_with_eot(monkeypatch, capsys, tmp_path):
    """A model that has memorized one answer gives it and stops."""
    reply = "the note reads"
    prompt = [special("usr"), *tokenizer().encode("so"), special("eot"), special("asst")]
    ids = [*prompt, *tokenizer().encode(reply), special("eot")]
    torch.manual_seed(0)
    model = GPT({"V": 404, "T": 64, "C": 32, "L": 1, "H": 2, "dropout": 0.0})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(60):
        logits = model(torch.tensor([ids[:-1]]))[0, len(prompt) - 1 :]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[len(prompt) :]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    save_checkpoint(tmp_path / "m.pt", model, None, 5, model.config)
    shutil.copy(token_caches.folder() / "tokenizer/spm.model", tmp_path / "tokenizer.model")
    assert chat(monkeypatch, capsys, tmp_path / "m.pt", "so", given=["--max-tokens", 50]) == f"niels> {reply}\n"


def test_a_conversation_longer_than_the_context(token_checkpoint, monkeypatch, capsys):
    output = chat(monkeypatch, capsys, token_checkpoint, *["the note reads so"] * 9, "the model " * 60)
    assert output.count("niels> ") == 10
    assert "refused" not in output
