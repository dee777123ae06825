"""vocab.json and merges.txt without tokenizer.json are read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from niels_gpt.export.gguf_bpe import read_bpe
from niels_gpt.export.pieces import HARD_TEXTS
from niels_gpt.pretrained.imported_run import import_model
from niels_gpt.runs.folder import RunFolder
from niels_gpt.tokenizer import load_tokenizer
from tests import foreign_tokenizers as made
from tests.pretrained.conftest import random_model, save


def write(folder: Path, name: str, config: dict | None, *, in_vocabulary: bool = False) -> Path:
    """Split the tokenizer.json of a tokenizer into the older files."""
    content = json.loads(made.MAKERS[name][0]().to_str())
    folder.mkdir(exist_ok=True)
    vocabulary, added = content["model"]["vocab"], {each["content"]: each["id"] for each in content["added_tokens"]}
    if in_vocabulary:
        vocabulary |= added
    elif config is not None:
        tokens = {each["id"]: {k: v for k, v in each.items() if k != "id"} for each in content["added_tokens"]}
        config = config | {"added_tokens_decoder": tokens}
    else:
        (folder / "added_tokens.json").write_text(json.dumps(added))
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


TEXTS = [*HARD_TEXTS, "a<|endoftext|>b <|im_start|>user\nc<|im_end|>", "# # ##", "e\u0301 \u00c5 1234"]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen", {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}),
        ("smollm", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}),
        ("smollm", {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True, "eos_token": "<|im_end|>"}),
    ],
)
def test_ids_are_those_of_transformers(name: str, config: dict, tmp_path: Path) -> None:
    folder = write(tmp_path, name, config)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    assert (ours.eos_token, ours.document_start) == ("<|im_end|>", [])


def test_as_the_first_gpt2_without_any_config(tmp_path: Path) -> None:
    """The end of a text stands in the vocabulary, and the class follows from the model."""
    folder = save(random_model("gpt2", vocab_size=403), tmp_path / "model")
    (folder / "generation_config.json").unlink()
    write(folder, "smollm", None, in_vocabulary=True)
    tokenizer = import_model(str(folder), RunFolder(tmp_path / "run")).tokenizer
    assert tokenizer is not None and tokenizer.vocab_size == 403
    end = json.loads((folder / "vocab.json").read_text())["<|endoftext|>"]
    assert tokenizer.special_token_ids() == {"eot": end, "<|endoftext|>": end}
    assert tokenizer.encode("a<|endoftext|>")[-1] == end and end not in tokenizer.encode_as_text("a<|endoftext|>")
    written = (tmp_path / "run" / "tokenizer" / "tokenizer.json").read_bytes()
    assert read_bpe(written).pre == "gpt-2"
    assert load_tokenizer(tmp_path / "run" / "tokenizer").sha256 == tokenizer.sha256


def test_added_tokens_in_their_own_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    tokenizer = load_tokenizer(write(tmp_path, "qwen", None))
    plain = load_tokenizer(made.make("qwen", tmp_path / "json"))
    assert [tokenizer.encode(text) for text in TEXTS] == [plain.encode(text) for text in TEXTS]


@pytest.mark.parametrize("kind", [None, "RobertaTokenizer"])
def test_another_class_is_refused_with_the_files(kind: str | None, tmp_path: Path) -> None:
    folder = write(tmp_path, "smollm", {} if kind is None else {"tokenizer_class": kind})
    with pytest.raises(ValueError, match=rf"vocab\.json and merges\.txt of a {kind}.*GPT2Tokenizer and Qwen2Tokenizer"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "data", "fact"),
    [
        ("vocab.json", b"[]", "must be a JSON object"),
        ("vocab.json", b"{", "damaged"),
        ("merges.txt", b"#version: 0.2\na b\nabc\n", "line 3"),
        ("merges.txt", b"\xff", "byte 0 is not utf-8"),
        ("added_tokens.json", b"nul", "damaged"),
    ],
)
def test_damaged(name: str, data: bytes, fact: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "smollm", {"tokenizer_class": "GPT2Tokenizer"})
    (folder / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}.*{fact}"):
        load_tokenizer(folder)
