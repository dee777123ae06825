"""Find damaged or mislabeled data files: which file, and where in it.

`explain` reads everything and runs only after a failure; `check_json_start` is quick and runs before reading.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from pathlib import Path

from niels_gpt.data.reading.local import suffix
from niels_gpt.system.json_text import parse_json


def explain(files: Iterable[str | Path]) -> str | None:
    """Return a sentence about the first file that does not match its suffix; None if all are fine."""
    for name in files:
        path = Path(name)
        problem = _problem(path)
        if problem:
            return f"cannot read {path}: {problem}"
    return None


def check_json_start(files: Iterable[str | Path]) -> None:
    """Raise ValueError for a .jsonl that does not begin with an object: pyarrow 26 crashes on a leading `null`."""
    for name in files:
        path = Path(name)
        if suffix(path) != ".jsonl":
            continue
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                head = file.read(4096)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            continue  # reported when it is read
        start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        if start and not start.startswith((b"{", b"[")):
            line = head[: len(head) - len(start)].count(b"\n") + 1
            raise ValueError(f"cannot read {path}: line {line} is not a JSON object; repair or remove the line")


def _problem(path: Path) -> str | None:
    if path.stat().st_size == 0:
        return "it is empty"
    if suffix(path) == ".parquet":
        return _parquet_problem(path)
    number = 0
    if path.suffix == ".gz":
        try:
            with gzip.open(path, "rb") as file:
                for _ in file:
                    number += 1
        except (EOFError, zlib.error, gzip.BadGzipFile) as err:
            return f"the gzip data is damaged or truncated after line {number} ({str(err).lower()}); download it again"
        number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                number += 1
                text = line.decode("utf-8")
                if suffix(path) == ".jsonl" and line.strip():
                    json.dumps(parse_json(text), ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as err:
        return f"line {number or 1} is not utf-8 (byte {err.start} of the line); convert the file"
    except UnicodeEncodeError:
        return f"line {number} has a lone surrogate, which is not a character; repair or remove the line"
    except ValueError as err:
        return f"line {number} is not JSON ({err}); repair or remove the line"
    if number == 0:
        return "it has no lines"
    return None


def _parquet_problem(path: Path) -> str | None:
    import pyarrow.parquet

    try:
        pyarrow.parquet.ParquetFile(path).read()
    except Exception as err:  # pyarrow raises a dozen types
        return f"it is not a parquet file, or is damaged ({str(err).splitlines()[0]}); download it again"
    return None
