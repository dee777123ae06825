"""BPE tokenizers of others in GGUF files: byte-level ones by their pre-tokenizer, those with byte fallback by score."""

import functools
import itertools
import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from niels_gpt.data import embedded
from niels_gpt.export import run_export
from niels_gpt.export.gguf_bpe import Token, read_bpe
from niels_gpt.export.gguf_file import write_gguf
from niels_gpt.export.hugging_face import write_hf
from niels_gpt.export.ollama import modelfile
from niels_gpt.model.gpt import GPT
from niels_gpt.tokenizer import ForeignTokenizer
from tests.cli import call
from tests.foreign_tokenizers import QWEN_PATTERN, TEXTS, llama2_json

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WITH_REGEX = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PRE_TOKENIZERS = {
    "gpt-2": WITH_REGEX,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WITH_REGEX]),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"), PLAIN]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"), PLAIN]),
}
"""llama.cpp's name -> the pre-tokenizer, as in the published files."""


@functools.cache
def bpe(pre: str) -> tokenizers.Tokenizer:
    """A small BPE tokenizer, trained on notes."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    made.pre_tokenizer, made.decoder = PRE_TOKENIZERS[pre], decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([path.read_text("utf-8") for path in sorted(embedded.NOTES.glob("*.md"))[:20]], trainer)
    made.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return made


def bpe_tokenizer(pre: str) -> ForeignTokenizer:
    """The same as a tokenizer of others."""
    config = b'{"eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}"}'
    return ForeignTokenizer({"tokenizer.json": bpe(pre).to_str().encode(), "tokenizer_config.json": config})


def changed(pre: str, **changes: object) -> bytes:
    content = json.loads(bpe(pre).to_str())
    for key, value in changes.items():
        content[key] = {**content["model"], **value} if key == "model" else value
    return json.dumps(content).encode()


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_the_tokenizers_are_recognized(pre):
    found = read_bpe(bpe(pre).to_str().encode())
    assert (found.model, found.pre, found.space_prefix) == ("gpt2", pre, False)
    assert len(found.tokens) == bpe(pre).get_vocab_size()
    assert all(bpe(pre).id_to_token(i) == token.text for i, token in enumerate(found.tokens))
    end = bpe(pre).token_to_id("<|end|>")
    assert {i: token.kind for i, token in enumerate(found.tokens) if token.kind != "NORMAL"} == {end: "CONTROL"}
    assert all(merge.count(" ") == 1 for merge in found.merges) and len(found.merges) > 200


def llama2(scheme: str = "prepend", **changes: object) -> bytes:
    """A tokenizer.json as Llama 2's; `model` changes parts of its model."""
    content = json.loads(llama2_json(scheme).to_str())
    content["model"] |= changes.pop("model", {})
    return json.dumps(content | changes).encode()


def merged_by_score(text: str, tokens: list[Token]) -> list[str]:
    """The pieces of a text by llama.cpp's rule: of all neighbors, merge those whose piece scores best."""
    scores = {token.text: token.score for token in tokens}
    pieces = list(text)
    while known := [(-scores[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]:
        at = min(known)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    as_bytes = {piece: [f"<0x{byte:02X}>" for byte in piece.encode()] for piece in pieces}
    return [part for piece in pieces for part in ([piece] if piece in scores else as_bytes[piece])]


@pytest.mark.parametrize(("scheme", "prefix"), [("prepend", True), ("never", False)])
def test_byte_fallback_is_merging_by_score(scheme, prefix):
    found = read_bpe(llama2(scheme))
    assert (found.model, found.merges, found.space_prefix, found.unknown_id) == ("llama", [], prefix, 0)
    kinds = [token.kind for token in found.tokens]
    assert kinds[:3] == ["UNKNOWN", "CONTROL", "CONTROL"] and kinds.count("BYTE") == 256
    for text in (*TEXTS, "aaaaaaa  the   theethe", "garden.garden"):
        expected = llama2_json(scheme).encode(text, add_special_tokens=False).tokens
        spaced = (" " if prefix else "") + text
        assert merged_by_score(spaced.replace(" ", "\u2581"), found.tokens) == expected


def test_ids_without_a_token_and_added_strings():
    content = json.loads(llama2())
    last, options = len(content["model"]["vocab"]), {"lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"].append({"id": last + 1, "content": "<tool>", "special": False, **options})
    kinds = [token.kind for token in read_bpe(json.dumps(content).encode()).tokens]
    assert kinds[last - 1 :] == ["NORMAL", "UNUSED", "USER_DEFINED"]


def added(**options: object) -> list[dict]:
    return [{"id": 1, "content": "<s>", "special": True, "normalized": False, **options}]


MERGES = [tuple(pair) for pair in json.loads(llama2())["model"]["merges"]]
VOCABULARY = json.loads(llama2())["model"]["vocab"]
SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (changed("gpt-2", pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        (changed("gpt-2", pre_tokenizer=None), "none"),
        (changed("gpt-2", pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}), "ByteLevel"),
        (changed("gpt-2", normalizer={"type": "Lowercase"}), "Lowercase"),
        (changed("gpt-2", model={"type": "Unigram"}), "Unigram"),
        (changed("gpt-2", model={"byte_fallback": True}), "ByteLevel"),
        (changed("gpt-2", added_tokens=added(id=600, lstrip=True)), "lstrip"),
        (changed("qwen2", model={"ignore_merges": True}), "ignore_merges=false"),
        (llama2("first"), "Metaspace"),
        (llama2("always"), "Metaspace"),
        (llama2(normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}, SPACES]}), "NFKC, Replace"),
        (llama2(normalizer=None), "none"),
        (llama2(added_tokens=added(normalized=True)), "'<s>' is normalized"),
        (llama2(added_tokens=added(single_word=True)), "single_word"),
        (llama2(model={"ignore_merges": True}), "ignore_merges"),
        (llama2(model={"vocab": {k: i for k, i in VOCABULARY.items() if k != "<0x0A>"}}), "<0x0A>"),
        (llama2(model={"merges": MERGES[:-1]}), "not those of a SentencePiece model"),
        (llama2(model={"merges": [MERGES[-1], *MERGES[:-1], MERGES[-1]]}), "at several ranks"),
    ],
)
def test_others_are_refused_by_name(data, named):
    with pytest.raises(ValueError, match=rf"export gguf.*{named}.*export hf"):
        read_bpe(data)


def test_an_imported_model_is_exported_as_it_came(tmp_path, monkeypatch):
    """A Llama with a padded embedding: imported, exported, and byte for byte the same weights and tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_export, "check_folder_ids", lambda folder, tokenizer: None)  # see test_self_check.py
    tokenizer = bpe_tokenizer("smollm")
    options = {"T": 16, "C": 32, "L": 1, "H": 2, "norm": "rmsnorm", "mlp": "swiglu"}
    Path("public").mkdir()
    write_hf(GPT({"V": tokenizer.vocab_size + 5, **options}), tokenizer, Path("public"))
    assert call("import", "hf", "public", "--run-dir", "run") == 0
    assert call("export", "hf", "run", "--out", "again") == 0  # not trained here: there is nothing to audit
    for name in ("model.safetensors", *tokenizer.files):
        assert Path("again", name).read_bytes() == Path("public", name).read_bytes()
    assert (Path("again") / "README.md").is_file()
    assert modelfile("m.gguf", tokenizer, 16).startswith("FROM ./m.gguf\n")


def test_files_of_others_are_written_as_they_are(tmp_path):
    tokenizer = bpe_tokenizer("smollm")
    options = {"T": 16, "C": 32, "L": 1, "H": 2, "norm": "rmsnorm", "mlp": "swiglu"}
    model = GPT({"V": tokenizer.vocab_size, **options})
    write_hf(model, tokenizer, tmp_path)
    for name, data in tokenizer.files.items():
        assert (tmp_path / name).read_bytes() == data
    assert not (tmp_path / "chat_template.jinja").exists()
    assert json.loads((tmp_path / "config.json").read_bytes())["eos_token_id"] == bpe("smollm").token_to_id("<|end|>")


def test_a_sentencepiece_model_of_others_is_refused(tmp_path):
    pytest.importorskip("gguf")
    tokenizer = bpe_tokenizer("smollm")
    tokenizer.files = {"tokenizer.model": b"x"}  # a real one needs no test here: it is refused by its name
    with pytest.raises(ValueError, match=r"tokenizer\.model"):
        write_gguf(GPT({"T": 16, "C": 32, "L": 1, "H": 2}), tokenizer, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []
