"""Where a model of others comes from: source.json of an imported run, base.json of a run that began with one (`hf:`).

A run with a source.json was imported, not trained here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from niels_gpt.system.json_text import parse_json

FILE, BASE_FILE = "source.json", "base.json"
SECTIONS = ("model",)
"""The sections of the config of an imported model: it has no data and no schedule."""


def is_imported(run: Path) -> bool:
    """Whether a run is an imported model, which has no steps: other runs start from it (`init_from`)."""
    return (run / FILE).exists()


def read_source(run: Path, file: str = FILE) -> dict[str, Any] | None:
    """Return what a run records of a model of others; None if there is no such file, or it is damaged."""
    try:
        source = parse_json((run / file).read_bytes())
        return {**source, "name": str(source["name"]), "licence": str(source["licence"])}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def source_text(source: Mapping[str, Any]) -> str:
    """Return where a model comes from, on one line."""
    kind = f" ({source['model_type']})" if "model_type" in source else ""
    return f"{source['name']}{kind}, licence: {source['licence'] or 'unknown'}"
