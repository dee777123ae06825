"""Tokenizers of others that would fill the memory or never end are refused, and large real ones are not."""

from __future__ import annotations

import base64
import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from niels_gpt.pretrained.imported_run import import_model
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system import untrusted_files
from niels_gpt.tokenizer import limits, load_tokenizer
from niels_gpt.tokenizer.limits import number_of_ids
from niels_gpt.tokenizer.piece_text import byte_characters
from tests import foreign_tokenizers as made
from tests.pretrained.conftest import random_model, save


def replace(old: str | dict[str, str], new: str) -> dict[str, Any]:
    pattern = old if isinstance(old, dict) else {"String": old}
    return {"type": "Replace", "pattern": pattern, "content": new}


def sequence(*steps: Any) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def write(folder: Path, merges: int = 0, added: int = 0, **parts: Any) -> Path:
    """Write a byte-level tokenizer with so many merges and added tokens, and other parts."""
    content = json.loads(made.smollm().to_str()) | parts
    if merges:
        alphabet = list(byte_characters().values())
        pairs = [(a + b, c) for a in alphabet for b in alphabet for c in alphabet[: merges // 65536 + 1]][:merges]
        content["model"]["merges"] = pairs
    content["added_tokens"] += [
        dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        | {"id": 1000 + n, "content": f"<extra {n}>", "special": True}
        for n in range(added)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


NESTED: Any = replace("a", "a" * 100)
for _ in range(5):
    NESTED = sequence(NESTED, replace("a", "a" * 100))
HOSTILE = {
    "six expansions": ({"normalizer": sequence(*[replace("a", "a" * 100)] * 6)}, "normalizer.*1,000,000,000,000 times"),
    "nested": ({"normalizer": NESTED}, "normalizer.*1,000,000,000,000 times"),
    "without types": ({"normalizer": {"normalizers": [{"prepend": "x" * 200}]}}, "normalizer.*201 times"),
    "expression": ({"normalizer": replace({"Regex": "z*"}, "b" * 100)}, "normalizer.*101 times"),
    "decoder": (
        {"decoder": {"type": "Sequence", "decoders": [replace("a", "a" * 100)] * 6}},
        "decoder.*1,000,000,000,000 times",
    ),
    "merges": ({"merges": 600_001}, "600,001 merges, more than 600,000"),
    "added tokens": ({"added": 100_001}, r"100,004 added tokens, more than 100,000"),
    "large id": (
        {"added_tokens": [{"id": 2**32 - 1, "content": "<x>", "special": True}]},
        "4,294,967,296 ids, more than 1,048,576",
    ),
    "deep": ({"pre_tokenizer": json.loads('{"pretokenizers": [' * 200 + "]}" * 200)}, "nested too deeply"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_expansions_and_large_numbers_are_refused_before_they_are_used(name: str, tmp_path: Path) -> None:
    parts, fact = HOSTILE[name]
    folder = write(tmp_path, **parts)
    before = time.process_time()
    with pytest.raises(ValueError, match=f"tokenizer.json.*{fact}"):
        load_tokenizer(folder)
    assert time.process_time() - before < 5  # the numbers took 30 s


def test_growth_up_to_the_limit_is_accepted(tmp_path: Path) -> None:
    assert load_tokenizer(write(tmp_path, normalizer=replace("qq", "q" * 200))).encode("qq")
    with pytest.raises(ValueError, match=r"normalizer can make a text 10\d times"):
        load_tokenizer(write(tmp_path, normalizer=sequence(replace("zz", ""), replace("qq", "q" * 202))))


def charsmap(longest: int) -> dict[str, Any]:
    """A Precompiled normalizer that replaces `a` by a string of this length."""
    label = ord("a")  # a trie of double arrays (darts): root, child of `a`, its leaf
    units = [0] * 512
    units[0] = 256 << 10
    units[256 ^ label] = label | 1 << 8 | (300 ^ 256 ^ label) << 10
    units[300] = 1 << 31
    blob = struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + b"a" * longest + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


def test_what_no_check_of_the_file_finds_ends_a_process_and_not_this_one(tmp_path: Path) -> None:
    """Tables of characters are not read here: they are tried."""
    assert load_tokenizer(write(tmp_path / "a", normalizer=charsmap(2))).lossy
    folder = write(tmp_path / "b", normalizer=sequence(*[charsmap(1000)] * 6))
    with pytest.raises(ValueError, match=r"tokenizer.json cannot be used.*1024 MiB"):
        load_tokenizer(folder)


def test_only_rules_that_may_be_slow_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(limits, "_problem", lambda library, model: tried.append(library))
    harmless, table = {"type": "ByteLevel"}, {"type": "Precompiled"}
    for rules in ({}, {"pre_tokenizer": harmless}, {"normalizer": sequence({"type": "NFC"}), "decoder": table}):
        limits.check_tokenizer_json({"model": {}, **rules}, "x")
    assert tried == []
    for rules in ({"normalizer": table}, {"pre_tokenizer": table}, {"normalizer": sequence(harmless, table)}):
        limits.check_tokenizer_json({"model": {}, **rules}, "x")
    assert tried == ["tokenizers"] * 3


def test_an_expression_that_gives_up_is_an_error(tmp_path: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    tokenizer = load_tokenizer(write(tmp_path, pre_tokenizer=split))
    with pytest.raises(ValueError, match=r"cannot encode a text.*retry-limit"):
        tokenizer.encode("x" * 1000)


def test_a_worker_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr(limits, "WORKER", script)
    monkeypatch.setattr(untrusted_files, "WALL_SECONDS", 0.3)
    monkeypatch.setattr(limits, "_problem", limits._problem.__wrapped__)
    for folder in (made.make("qwen", tmp_path / "a"), made.make("sentencepiece", tmp_path / "b")):
        with pytest.raises(ValueError, match=r"tokenizer\.(json|model) cannot be used.*more than"):
            load_tokenizer(folder)


def test_ids_that_the_model_does_not_have_are_refused_before_the_tokenizer_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(random_model("smollm2"), tmp_path / "model")
    write(folder, added=5)
    monkeypatch.setattr("tokenizers.Tokenizer.from_str", lambda *_: pytest.fail("built"))
    with pytest.raises(ValueError, match="1005 ids, but the embedding only 300"):
        import_model(str(folder), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_added_ids_of_a_sentencepiece_model_are_bounded(tmp_path: Path) -> None:
    added = {str(10**9): {"content": "<x>", "special": True}}
    with pytest.raises(ValueError, match=r"tokenizer_config.json.*1,000,000,001 ids, more than"):
        load_tokenizer(made.make("sentencepiece", tmp_path, added_tokens_decoder=added))


def test_numbers_of_ids() -> None:
    vocabulary = [["a", 0.0], ["b", 0.0], ["c", 0.0]]
    for ids, added in ((3, 1), (3, 2), (4, 3)):
        assert number_of_ids({"model": {"vocab": vocabulary}, "added_tokens": [{"id": added}]}) == ids
    assert number_of_ids({"model": {"vocab": {"a": 3}}, "added_tokens": [{"id": 9}, "x"]}) == 10
    assert number_of_ids({"model": {}}) == 0
    limits.check_numbers(limits.MOST_IDS, limits.MOST_ADDED, limits.MOST_MERGES, "x")
    for numbers, fact in (((2**20 + 1, 0, 0), "ids"), ((0, 10**5 + 1, 0), "added"), ((0, 0, 6 * 10**5 + 1), "merges")):
        with pytest.raises(ValueError, match=f"x has {max(numbers):,} {fact}"):
            limits.check_numbers(*numbers, "x")


@pytest.mark.slow
def test_a_tokenizer_as_large_as_that_of_llama_3_is_loaded(tmp_path: Path) -> None:
    """128,000 pieces and 280,000 merges; about 2 s of computing."""
    content = json.loads(made.llama3().to_str())
    alphabet = list(byte_characters().values())
    pieces = [*alphabet, *(a + b for a in alphabet for b in alphabet)]
    pieces += [a + b for a in pieces[256:] for b in alphabet[:1]][: 128_000 - len(pieces)]
    known = set(pieces)
    splits = [(text[:n], text[n:]) for text in pieces for n in range(1, len(text))]
    merges = [pair for pair in splits if known.issuperset(pair)]
    merges = (merges * 3)[:280_000]
    content["model"] |= {"vocab": {text: n for n, text in enumerate(pieces)}, "merges": merges}
    content["post_processor"] = None
    content["added_tokens"] = [token | {"id": len(pieces) + n} for n, token in enumerate(content["added_tokens"])]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(made.LLAMA3_CONFIG))
    before = time.process_time()
    assert load_tokenizer(tmp_path).vocab_size == len(pieces) + 5
    assert time.process_time() - before < 20
