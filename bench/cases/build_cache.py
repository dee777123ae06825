"""Building a pretrain cache from text, beside SentencePiece's batched encode and a plain loop that encodes and writes.

The text is wikitext-2 and books if BENCH_DATA (default ../shared/data) has them, else the docstrings of Python.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

from bench.case import Case, Contender, Work, temporary_folder

DATA = Path(os.environ.get("BENCH_DATA", "../shared/data"))


def documents(quick: bool) -> list[str]:
    """Return about 25 MB of documents of at most 4,000 characters."""
    from niels_gpt.data.embedded import iter_stdlib

    books, rows = DATA / "gutenberg-sample" / "train.jsonl.gz", DATA / "wikitext" / "wikitext-2-v1" / "train.parquet"
    if quick or not (books.is_file() and rows.is_file()):
        texts = [text for _, text in iter_stdlib()]
        return texts[:20] if quick else texts * 10
    import pyarrow.parquet

    with gzip.open(books, "rt", encoding="utf-8") as file:
        pages = [
            text[i : i + 4000]
            for line in file
            for text in [json.loads(line)["text"]]
            for i in range(0, len(text), 4000)
        ]
    lines = pyarrow.parquet.read_table(rows).column("text").to_pylist()
    return [text.replace("\r\n", "\n") for text in (*pages, *(line for line in lines if line.strip()))]


def _work(quick: bool, name: str) -> Work:
    import itertools

    import numpy as np
    import sentencepiece

    from niels_gpt.tokenizer import load_tokenizer, train_tokenizer

    texts, root = documents(quick), temporary_folder()
    vocab = 1000 if quick else 16_000
    sample = itertools.islice(texts, 0, None, 1 if quick else 10)
    tokenizer = load_tokenizer(train_tokenizer(sample, root / "tokenizer", vocab_size=vocab))
    sp: Any = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model)
    cores = len(os.sched_getaffinity(0))

    def ours() -> None:
        from niels_gpt.cache.build_cache import build_pretrain_cache

        build_pretrain_cache(
            texts,
            root / "cache",
            tokenizer=tokenizer,
            max_train_tokens=1 << 40,
            max_val_tokens=0,
            shard_bytes=128 << 20,
            seed=0,
            shuffle_buffer=None,
        )
        shutil.rmtree(root / "cache")

    def batched() -> None:
        sp.encode(texts, num_threads=cores)

    def loop() -> None:
        with (root / "loop.bin").open("wb") as file:
            for text in texts:
                file.write(np.array([*sp.EncodeAsIds(text), 4], dtype=np.uint16).tobytes())

    work = {"ours": ours, "batched": batched, "loop": loop}[name]
    return Work(work, amount=sum(len(ids) for ids in sp.encode(texts)) + len(texts))


def _contender(label: str, name: str, **options: Any) -> Contender:
    return Contender(label, lambda quick: _work(quick, name), **options)


CASE = Case(
    "build_cache",
    "tokens/s",
    (
        _contender("niels-gpt, beside a loop", "ours", role="ours", group="loop", target=1.8),
        _contender("EncodeAsIds and write", "loop", group="loop"),
        _contender("niels-gpt, beside encode", "ours", role="ours", group="encode", target=0.9),
        _contender("SentencePiece, all cores", "batched", group="encode"),
    ),
)
