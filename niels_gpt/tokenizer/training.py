"""Train a tokenizer on a seeded sample of the text; write `spm.model` and `meta.json`."""

from __future__ import annotations

import hashlib
import io
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from niels_gpt.system import files, host_limits
from niels_gpt.system.checked_json import write_checked_json
from niels_gpt.tokenizer.private_pieces import without_pieces
from niels_gpt.tokenizer.special import SPECIAL_TOKENS
from niels_gpt.tokenizer.subword import BLOCK, Tokenizer

CHUNK = 1000
"""Maximum characters of a chunk, the unit of sampling."""
SAMPLE_CHUNKS = 20_000
"""Chunks in the sample: at most 20 million characters, however long the input is."""
MAX_VOCAB = 65_536 - len(SPECIAL_TOKENS)
"""Ids are stored in 16 bits."""
_THREADS = 8  # fixed, not the number of cores: the result of float sums depends on the number of threads
_MEMORY_PER_BYTE = 30
"""Address space that SentencePiece takes per byte of the sample: 26 measured for 5 MB."""


def train_tokenizer(
    texts: Iterable[str],
    out_dir: str | Path,
    *,
    vocab_size: int = 16_000,
    seed: int = 42,
    sample_chunks: int = SAMPLE_CHUNKS,
    dropped: Callable[[Tokenizer], Collection[int]] | None = None,
) -> str:
    """Train a unigram SentencePiece model; return the path of `out_dir/spm.model`, with `meta.json` beside it.

    `vocab_size` counts the pieces without the four special tokens. It must be at least 257 (256 bytes and `<unk>`) plus
    the number of different characters. A text with fewer useful pieces gives a smaller vocabulary and a warning. The
    same texts and seed give the same bytes. Memory is bounded: a seeded reservoir keeps `sample_chunks` chunks.
    dropped: returns the ids of pieces that the model shall not have, such as `private_pieces`.
    Raises ValueError for a vocab_size that is too small or above 65,532, for empty input, and for an out_dir that is a
    file or not writable.
    """
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or not 257 < vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size must be in 258..{MAX_VOCAB} (ids are stored in 16 bits), got {vocab_size!r}")
    if sample_chunks < 1:
        raise ValueError(f"sample_chunks must be at least 1, got {sample_chunks}")
    files.check_output_path(out_dir, "out_dir", folder=True)
    inputs = _Inputs()
    sample = reservoir(_chunks(inputs.watch(texts)), sample_chunks, seed=seed)
    if not sample:
        raise ValueError(f"no text to train a tokenizer on ({inputs.texts} texts, {inputs.bytes} bytes)")
    characters = len(set().union(*sample) - {" "}) + 1
    if vocab_size < 257 + characters:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: 256 bytes, <unk> and {characters} different characters "
            f"need {257 + characters}; use a larger vocab_size"
        )
    tokenizer = Tokenizer(_train(sample, vocab_size + len(SPECIAL_TOKENS)))
    pieces = tokenizer.vocab_size - len(SPECIAL_TOKENS)
    if pieces < vocab_size:
        warnings.warn(f"the text has only {pieces:,} useful pieces, fewer than vocab_size={vocab_size:,}", stacklevel=2)
    if dropped is not None:
        tokenizer = Tokenizer(without_pieces(tokenizer.model, dropped(tokenizer)))
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spm.model"
    meta = {
        "format": "niels-gpt tokenizer",
        "format_version": 1,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "vocab_size_asked": vocab_size,
        "special_token_ids": tokenizer.special_token_ids(),
        "seed": seed,
        "inputs": {"texts": inputs.texts, "bytes": inputs.bytes, "sha256": inputs.sha256()},
        "sample": {"chunks": len(sample), "bytes": sum(len(chunk.encode("utf-8")) for chunk in sample)},
        "versions": {"sentencepiece": version("sentencepiece")},
    }
    # The model last: after a kill in between, it is missing or does not match the meta, and is trained again.
    write_checked_json(folder / "meta.json", meta)
    files.write_bytes(path, tokenizer.model)
    return str(path)


def reservoir(items: Iterable[str], size: int, *, seed: int) -> list[str]:
    """Return a uniform sample of at most `size` items, in input order.

    Item n replaces a random sampled item with probability size / n (Vitter's algorithm R).
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    sample: list[tuple[int, str]] = []
    draws: Iterator[float] = iter(())
    for n, item in enumerate(items):
        if n < size:
            sample.append((n, item))
            continue
        draw = next(draws, None)
        if draw is None:
            draws = iter(torch.rand(4096, generator=generator, dtype=torch.float64).tolist())
            draw = next(draws)
        slot = int(draw * (n + 1))
        if slot < size:
            sample[slot] = (n, item)
    return [item for _, item in sorted(sample)]


class _Inputs:
    """Count and hash texts while they are iterated."""

    def __init__(self) -> None:
        self.texts = self.bytes = 0
        self._hash = hashlib.sha256()

    def watch(self, texts: Iterable[str]) -> Iterator[str]:
        if isinstance(texts, str):
            raise ValueError("texts must be an iterable of strings, such as a list; got one string")
        for text in texts:
            if not isinstance(text, str):
                raise ValueError(f"text {self.texts} is a {type(text).__name__}, not a string")
            data = text.encode("utf-8", errors="surrogatepass")
            self.texts += 1
            self.bytes += len(data)
            # With the length, so that ("ab", "c") and ("a", "bc") differ.
            self._hash.update(len(data).to_bytes(8, "little") + data)
            yield text

    def sha256(self) -> str:
        return self._hash.hexdigest()


_UNSUPPORTED = re.compile(rf"[\t\0\u2585{BLOCK}\ud800-\udfff]+")
"""Characters that SentencePiece uses internally, or does not accept."""


def _chunks(texts: Iterable[str]) -> Iterator[str]:
    """Split texts into chunks of at most CHUNK characters, at white space if possible; "\\r\\n" becomes "\\n"."""
    for text in texts:
        text = _UNSUPPORTED.sub(" ", text.replace("\r\n", "\n"))
        for special in SPECIAL_TOKENS:
            text = text.replace(special, " ")
        start = 0
        while start < len(text):
            end = min(start + CHUNK, len(text))
            if end < len(text):
                space = max(text.rfind(" ", start + CHUNK // 2, end), text.rfind("\n", start + CHUNK // 2, end))
                end = space if space > 0 else end
            chunk = text[start:end]
            if chunk.strip():
                yield chunk
            start = end


def _train(sample: list[str], vocab_size: int) -> bytes:
    """Return the bytes of the model; they depend only on the sample and vocab_size, not on paths or time."""
    import sentencepiece

    out = io.BytesIO()
    options: dict[str, Any] = {
        "model_type": "unigram",
        "vocab_size": vocab_size,
        "hard_vocab_limit": False,
        "byte_fallback": True,
        "character_coverage": 1.0,
        "required_chars": BLOCK,  # a space is a piece even if the text has none
        "normalization_rule_name": "identity",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
        "user_defined_symbols": list(SPECIAL_TOKENS),
        "unk_id": 0,
        "bos_id": -1,
        "eos_id": -1,
        "pad_id": -1,
        "input_sentence_size": 0,
        "shuffle_input_sentence": False,
        "max_sentence_length": 8 * CHUNK,
        "num_threads": _THREADS,
        "minloglevel": 2,
    }
    reserve = host_limits.MARGIN + _MEMORY_PER_BYTE * sum(len(chunk.encode("utf-8")) for chunk in sample)
    # SentencePiece would abort the process.
    host_limits.check_threads(1 + _THREADS, "training a tokenizer", reserve=reserve)
    errors: list[RuntimeError] = []

    def train() -> None:
        try:
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sample), model_writer=out, **options)
        except RuntimeError as err:
            errors.append(err)

    # A thread, because Ctrl-C has no effect on the main thread while it runs C++. Waiting for a thread can be
    # interrupted; the daemon thread then ends with the process.
    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        thread.join()
    except KeyboardInterrupt as err:
        err.leave_at_once = True  # type: ignore[attr-defined]  # the clean-up of the process would compete with it
        raise
    if errors:
        if host_limits.is_thread_error(errors[0]):
            raise errors[0]
        reason = " ".join(str(errors[0]).split())
        raise ValueError(f"SentencePiece could not train on this text: {reason}") from errors[0]
    return out.getvalue()
