"""JSON files that contain a checksum of their own content.

The checksum is a field of the object, so the files stay readable and editable as JSON. An edit by hand is found like
any damage: delete the field to accept it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from niels_gpt.system import files
from niels_gpt.system.json_text import parse_json

FIELD = "checksum"
"""Key of the checksum: `sha256:` and the hash of the other fields as compact JSON with sorted keys."""


class DamagedJSON(ValueError):
    """A JSON file that does not parse, or whose content does not match its checksum. The message has no path."""


def checksum(value: dict[str, Any]) -> str:
    """The checksum of an object; a field `checksum` in it does not count."""
    rest = {key: item for key, item in value.items() if key != FIELD}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return f"sha256:{files.sha256_bytes(text.encode('ascii'))}"


def write_checked_json(path: str | Path, value: dict[str, Any], *, mode: int | None = None) -> None:
    """Write an object with its checksum, atomically; the same object gives the same bytes."""
    value = json.loads(json.dumps(value))  # as it will be read: tuples become lists, keys become strings
    files.write_json(path, {**value, FIELD: checksum(value)}, mode=mode)


def read_checked_json(path: str | Path) -> dict[str, Any]:
    """Read an object, without its checksum. Accepts a file that has none: a foreign file, or one of an older version.

    Raises DamagedJSON if the content is no object or differs from the checksum, and OSError if it cannot be read.
    """
    return parse_checked_json(Path(path).read_bytes())


def parse_checked_json(data: bytes) -> dict[str, Any]:
    """`read_checked_json` of bytes already read."""
    try:
        value = parse_json(data)
    except ValueError as err:
        raise DamagedJSON(str(err)) from None
    if not isinstance(value, dict):
        raise DamagedJSON(f"{type(value).__name__}, expected an object")
    if FIELD in value and value.pop(FIELD) != checksum(value):
        raise DamagedJSON(f"its content differs from its {FIELD}")
    return value
