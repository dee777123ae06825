"""After a file could not be read: which one, and where in it. Slow and careful; runs only then."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from pathlib import Path


def explain(files: Iterable[str | Path]) -> str | None:
    """One sentence about the first file that is not what its name says; None if all seem fine."""
    for name in files:
        path = Path(name)
        problem = _problem(path)
        if problem:
            return f"cannot read {path}: {problem}"
    return None


def _problem(path: Path) -> str | None:
    if path.stat().st_size == 0:
        return "it is empty"
    if path.suffix == ".parquet":
        return _parquet_problem(path)
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                number += 1
                text = line.decode("utf-8")
                if plain.suffix == ".jsonl" and line.strip():
                    json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8")
    except (EOFError, zlib.error, gzip.BadGzipFile) as err:
        return f"the gzip data is damaged or cut off after line {number} ({str(err).lower()}); fetch the file again"
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
