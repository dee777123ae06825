"""Files that are not what their names say: which one, and where in it.

`explain` is slow and careful and runs only after a failure; `refuse_odd_json` is quick and runs before.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from pathlib import Path

from niels_gpt.data.reading.local import suffix


def explain(files: Iterable[str | Path]) -> str | None:
    """One sentence about the first file that is not what its name says; None if all seem fine."""
    for name in files:
        path = Path(name)
        problem = _problem(path)
        if problem:
            return f"cannot read {path}: {problem}"
    return None


def refuse_odd_json(files: Iterable[str | Path]) -> None:
    """Raise ValueError for a .jsonl that does not begin with a row: pyarrow 26 crashes on a `null` there."""
    for name in files:
        path = Path(name)
        if suffix(path) != ".jsonl":
            continue
        try:
            with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
                head = file.read(4096)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            continue  # explained when it is read
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
            return f"the gzip data is damaged or cut off after line {number} ({str(err).lower()}); fetch the file again"
        number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                number += 1
                text = line.decode("utf-8")
                if suffix(path) == ".jsonl" and line.strip():
                    json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as err:
        return f"line {number or 1} is not utf-8 (byte {err.start} of it); convert the file"
    except UnicodeEncodeError:
        return f"line {number} has half of a surrogate pair, which is no character; repair or remove the line"
    except ValueError as err:
        return f"line {number} is not JSON ({err}); repair or remove the line"
    if number == 0:
        return "it holds no line"
    return None


def _parquet_problem(path: Path) -> str | None:
    import pyarrow.parquet

    try:
        pyarrow.parquet.ParquetFile(path).read()
    except Exception as err:  # pyarrow has a dozen of them
        return f"it is not a parquet file, or a damaged one ({str(err).splitlines()[0]}); fetch it again"
    return None
