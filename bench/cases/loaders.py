"""Samples from local files, beside plain `datasets` on the same rows: dolly, oasst1, and a stream.

Reads databricks-dolly-15k/ and oasst1/ from BENCH_DATA (default ../shared/data) if they exist, else generated rows of
the same shape. The stream is like fineweb: 3 kB of text and eight other fields per row.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.case import Case, Contender, Work

DATA = Path(os.environ.get("BENCH_DATA", "../shared/data"))


def _rows(name: str, quick: bool) -> list[dict[str, Any]]:
    draw = random.Random(0)
    text = " ".join(draw.choices(("data", "model", "a", "the", "learns", "of", "byte"), k=600))
    if name == "stream":
        extra = {"id": "x" * 40, "dump": "d", "url": "https://example.org/" + "y" * 40, "file_path": "z" * 60}
        numbers = {"language": "en", "language_score": 0.9, "token_count": 700, "score": 3.1}
        return [{"text": text, **extra, **numbers} for _ in range(100 if quick else 20_000)]
    if name == "dolly":
        row = {"instruction": text[:80], "context": "", "response": text[:360], "category": "open_qa"}
        return [row] * (100 if quick else 15_000)
    return [
        {
            "message_id": f"m{i}",
            "parent_id": None if i % 10 == 0 else f"m{i - 1 - i % 3 if i % 10 > 3 else i - 1}",
            "message_tree_id": f"m{i - i % 10}",
            "role": "prompter" if i % 2 == 0 else "assistant",
            "text": text[:400],
            "lang": "en",
        }
        for i in range(100 if quick else 20_000)
    ]


def _files(name: str, quick: bool) -> tuple[str, str]:
    """Return (builder, file) of the rows; the file is temporary if there is no real one."""
    real = {"dolly": DATA / "databricks-dolly-15k" / "train.jsonl.gz", "oasst1": DATA / "oasst1" / "validation.parquet"}
    if not quick and name in real and real[name].is_file():
        return ("parquet" if real[name].suffix == ".parquet" else "json"), str(real[name])
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False, encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in _rows(name, quick))
    atexit.register(Path(file.name).unlink)
    return "json", file.name


def _work(name: str, quick: bool, ours: bool) -> Work:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import logging

    import datasets

    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    kind, file = _files(name, quick)

    def theirs() -> Any:
        return datasets.load_dataset(kind, data_files={"train": [file]}, split="train", streaming=name == "stream")

    def mine() -> Any:
        if name == "dolly":
            from niels_gpt.data.dolly import iter_dolly_sft

            return iter_dolly_sft(path=file)
        if name == "oasst1":
            from niels_gpt.data.oasst1 import iter_oasst1_sft

            return iter_oasst1_sft(path=file, split="validation" if "validation" in file else "train")
        from niels_gpt.data.fineweb_edu import iter_fineweb_edu

        return iter_fineweb_edu(path=file, shuffle=False)

    def run() -> None:
        for _ in mine() if ours else theirs():
            pass

    run()  # the first time, `datasets` converts the file
    rows = sum(1 for _ in theirs())
    return Work(run, amount=rows / 1000)


def _pair(name: str, target: float) -> tuple[Contender, Contender]:
    def build(ours: bool) -> Callable[[bool], Work]:
        return lambda quick: _work(name, quick, ours)

    return (
        Contender(f"niels-gpt, {name}", build(True), role="ours", group=name, target=target),
        Contender(f"datasets, {name}", build(False), group=name),
    )


CASE = Case("loaders", "ms", (*_pair("dolly", 0.5), *_pair("oasst1", 0.5), *_pair("stream", 0.91)))
