"""Small tokenizers in the formats of other projects, trained on a few sentences: folders as they are published."""

import io
import json
from functools import cache
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A conversation has a system, a user and an assistant; the user asks what the assistant answers.",
    "In 1984 the garden had 12 apple trees, 7 pears and a small café called Über.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "[INST] <<SYS>> What is the capital of France? [/INST] Paris is the capital of France.",
] * 4
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_folder(folder: Path, tokenizer: Tokenizer | bytes, config: dict | None = None, **more) -> Path:
    """Write a tokenizer (a `Tokenizer`, or the bytes of a SentencePiece model) with its config; return the folder.

    more: name -> content of further files, `generation_config` for `generation_config.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer, bytes):
        (folder / "tokenizer.model").write_bytes(tokenizer)
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, content in more.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def byte_level(specials: list[str], vocab_size: int = 400, pattern: str | None = None) -> Tokenizer:
    """A byte-level BPE as GPT-2's, or with the pattern of Qwen and Llama 3; specials follow the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    return tokenizer


@cache
def smollm() -> Tokenizer:
    """As SmolLM2's: byte-level BPE, single digits, ChatML tokens, nothing added to a text."""
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    return tokenizer


@cache
def qwen() -> Tokenizer:
    """As Qwen2's: byte-level BPE with NFC, and added tokens that are not special."""
    tokenizer = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pattern=QWEN_PATTERN)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<tool_call>", "</tool_call>")])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


@cache
def llama3() -> Tokenizer:
    """As Llama 3's: byte-level BPE that puts <|begin_of_text|> before a text."""
    names = ["begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id"]
    tokenizer = byte_level([f"<|{name}|>" for name in names], pattern=QWEN_PATTERN)
    start = "<|begin_of_text|>"
    template = processors.TemplateProcessing(
        single=f"{start} $A", pair=f"{start} $A {start} $B", special_tokens=[(start, tokenizer.token_to_id(start))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def converted(model: bytes) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return vocabulary and merges of a SentencePiece BPE as transformers does: every pair that makes a piece."""
    found = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocabulary = {found.id_to_piece(i): i for i in range(found.vocab_size())}
    merges = []
    for piece in sorted(vocabulary, key=lambda piece: -found.get_score(vocabulary[piece])):
        splits = [(piece[:n], piece[n:]) for n in range(1, len(piece))]
        pairs = [pair for pair in splits if vocabulary.keys() >= set(pair)]
        merges += sorted(pairs, key=lambda pair: [vocabulary[part] for part in pair])
    return vocabulary, merges


@cache
def llama2_json(scheme: str = "prepend") -> Tokenizer:
    """As Llama 2's tokenizer.json: BPE with byte fallback over spaces that are written as U+2581.

    scheme: `prepend` is the normalizer of older files; `first`, `always` and `never` are those of Metaspace.
    """
    vocabulary, merges = converted(sentencepiece_model())
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in ("<unk>", "<s>", "</s>")]
    )
    content = json.loads(tokenizer.to_str())
    steps = [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}]
    steps += [{"type": "Fuse"}]
    if scheme == "prepend":
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        content["normalizer"] = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace],
        }
    else:
        content["pre_tokenizer"] = {
            "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False,
        }  # fmt: skip
    if scheme != "never":
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    content["decoder"] = {"type": "Sequence", "decoders": steps}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


@cache
def unigram() -> Tokenizer:
    """A unigram model as T5's and XLNet's: Metaspace decoder, no byte fallback, special strings in its vocabulary."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@cache
def sentencepiece_model(**options) -> bytes:
    """The bytes of a SentencePiece model as TinyLlama's: BPE, dummy prefix, byte fallback."""
    out = io.BytesIO()
    usual = {
        "model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "character_coverage": 0.99995,
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False, "split_digits": True,
        "allow_whitespace_only_pieces": True, "hard_vocab_limit": False, "minloglevel": 2,
    }  # fmt: skip
    lines = [line for text in TEXTS for line in text.split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, **usual | options)
    return out.getvalue()


SMOLLM_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
    "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>",
}  # fmt: skip
QWEN_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, "bos_token": None,
    "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
}  # fmt: skip
LLAMA3_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>",
}  # fmt: skip
LLAMA2_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    "add_bos_token": True, "add_eos_token": False,
}  # fmt: skip
MAKERS = {
    "smollm": (smollm, SMOLLM_CONFIG),
    "qwen": (qwen, QWEN_CONFIG),
    "llama3": (llama3, LLAMA3_CONFIG),
    "llama2": (llama2_json, LLAMA2_CONFIG),
    "llama2-first": (lambda: llama2_json("first"), LLAMA2_CONFIG),
    "llama2-never": (lambda: llama2_json("never"), LLAMA2_CONFIG),
    "unigram": (unigram, LLAMA2_CONFIG | {"add_bos_token": False}),
    "sentencepiece": (sentencepiece_model, LLAMA2_CONFIG | {"tokenizer_class": "LlamaTokenizer"}),
}
"""Name -> (a function that makes the tokenizer, its tokenizer_config.json)."""


def make(name: str, folder: Path, **config) -> Path:
    """Write the tokenizer of MAKERS with this name into a folder; `config` changes its tokenizer_config.json."""
    maker, usual = MAKERS[name]
    return write_folder(folder, maker(), usual | config)
