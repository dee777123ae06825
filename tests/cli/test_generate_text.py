"""`niels-gpt generate`: against the Python function with the same seed and sampling."""

import json
import re
import sys

import pytest
import torch

from niels_gpt import generate
from niels_gpt.inference.generation import generate_batch
from niels_gpt.inference.int8 import Int8GPT
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import load_model, save_checkpoint
from tests.cli import call, error_of, piped, typed


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def continued(checkpoint, prompt, n=30, *, seed=1, **options):
    model, _ = load_model(checkpoint)
    drawn_from = torch.Generator().manual_seed(seed)
    return generate(model, prompt, max_new_tokens=n, generator=drawn_from, **options)


def test_generate_prints_prompt_and_continuation(checkpoint, capsys):
    assert call("generate", "hello", "--checkpoint", checkpoint, "--max-tokens", 30, "--seed", 1) == 0
    output, errors = capsys.readouterr()
    assert output == continued(checkpoint, "hello") + "\n"
    assert errors == ""
    assert call("generate", "hello", "--checkpoint", checkpoint, "--max-tokens", 30, "--temperature", 0) == 0
    assert len(capsys.readouterr().out) == len("hello") + 30 + 1


def test_a_seed_repeats_the_text_and_no_seed_does_not(checkpoint, capsys):
    texts = []
    for seed in (["--seed", 1], ["--seed", 1], ["--seed", 2], [], []):
        assert call("generate", "hello", "--checkpoint", checkpoint, "--max-tokens", 40, *seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_the_sampling_options_reach_the_model(checkpoint, capsys):
    for options, wanted in (
        (["--temperature", 0], {"temperature": 0.0}),
        (["--temperature", 2, "--top-k", 0], {"temperature": 2.0, "top_k": None}),
        (["--top-k", 3], {"top_k": 3}),
        (["--top-p", 0.4], {"top_p": 0.4}),
        (["--min-p", 0.5], {"min_p": 0.5}),
    ):
        assert call("generate", "ab", "--checkpoint", checkpoint, "--max-tokens", 30, "--seed", 1, *options) == 0
        assert capsys.readouterr().out == continued(checkpoint, "ab", **wanted) + "\n"


def test_several_continuations(checkpoint, capsys):
    model, _ = load_model(checkpoint)
    drawn_from = torch.Generator().manual_seed(1)
    texts = generate_batch(model, ["ab"] * 3, max_new_tokens=12, sampling=Sampling(), generator=drawn_from)
    assert len(set(texts)) == 3
    options = ["--checkpoint", checkpoint, "--max-tokens", 12, "--seed", 1, "-n", 3]
    assert call("generate", "ab", *options) == 0
    output = capsys.readouterr().out
    assert output == "".join(f"--- {i} of 3\n{text}\n" for i, text in enumerate(texts, 1))
    assert call("generate", "ab", *options, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"checkpoint": str(checkpoint), "prompt": "ab", "texts": texts}


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_stop(checkpoint, capsys, json_too):
    free = continued(checkpoint, "ab", 40, temperature=0.0)[2:]
    stop = free[10:12]
    options = ["--checkpoint", checkpoint, "--max-tokens", 40, "--temperature", 0, "--stop", "zzz", "--stop", stop]
    assert call("generate", "ab", *options, *json_too) == 0
    output = capsys.readouterr().out
    text = json.loads(output)["texts"][0] if json_too else output[:-1]
    assert text == "ab" + free[: free.index(stop)]


def test_the_prompt_from_standard_input(checkpoint, capsys, monkeypatch):
    typed(monkeypatch, "two\nlines é\n")
    assert call("generate", "-", "--checkpoint", checkpoint, "--max-tokens", 8, "--seed", 1) == 0
    assert capsys.readouterr().out == continued(checkpoint, "two\nlines é\n", 8) + "\n"


def test_an_empty_prompt(checkpoint, capsys, monkeypatch):
    assert call("generate", "", "--checkpoint", checkpoint) == 1
    assert "prompt is empty" in error_of(capsys)
    typed(monkeypatch, "")
    assert call("generate", "-", "--checkpoint", checkpoint) == 1
    assert "prompt is empty" in error_of(capsys)


def test_int8_weights(checkpoint, capsys):
    options = ["--checkpoint", checkpoint, "--max-tokens", 30, "--temperature", 0, "--device", "cpu"]
    assert call("generate", "hello", *options, "--weights", "int8") == 0
    printed = capsys.readouterr().out
    int8 = Int8GPT.of(load_model(checkpoint)[0])
    assert printed == generate(int8, "hello", max_new_tokens=30, temperature=0.0) + "\n"
    assert call("generate", "hello", *options, "--weights", "int4") != 0
    assert re.search("--weights.*float32 or int8.*'int4'", error_of(capsys))


@pytest.mark.parametrize("options", [["--temperature", "0"], ["--json", "-n", "2"]])
def test_broken_weights_are_refused(tmp_path, capsys, monkeypatch, options):
    model = GPT({"T": 8, "C": 4, "L": 1, "H": 1, "dropout": 0.0})
    with torch.no_grad():
        model.blocks[0].mlp.up.weight[0, 0] = torch.nan
    save_checkpoint(tmp_path / "m.pt", model, None, 5, model.config)
    assert call("generate", "hello", "--checkpoint", "m.pt", "--device", "cpu", *options) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert "weights are broken" in errors
    typed(monkeypatch, "abc\n")
    assert call("chat", "--checkpoint", "m.pt") == 1
    assert "weights are broken" in error_of(capsys)


@pytest.mark.parametrize("command", ["generate -", "chat"])
def test_closed_standard_input(checkpoint, capsys, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", None)
    assert call(*command.split(), "--checkpoint", checkpoint) == 1
    assert "standard input is closed" in error_of(capsys)


def test_a_prompt_that_is_not_utf_8(checkpoint, capsys, monkeypatch):
    piped(monkeypatch, "é\nab".encode() + b"\xff\xfe")
    assert call("generate", "-", "--checkpoint", checkpoint) == 1
    assert re.search("standard input.*utf-8.*byte 5", error_of(capsys))
    piped(monkeypatch, "é".encode())
    assert call("generate", "-", "--checkpoint", checkpoint, "--max-tokens", 30, "--seed", 1) == 0
    assert capsys.readouterr().out == continued(checkpoint, "é") + "\n"
