"""Where the sources `wiki`, `roam` and `primer` are read from, and how tables name them."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from niels_gpt.config import RunConfig
from niels_gpt.config.public_model import PREFIX, folder_or_id, is_public
from niels_gpt.data import embedded
from niels_gpt.system.files import expand_home
from niels_gpt.system.urls import is_url

ROAM = ".roam-data"
"""Default folder of notes, relative to the working directory."""
PRIMER = "data/primer.txt"
"""Default file of dialogues, relative to the working directory."""

_DOCSTRINGS = " (Python docstrings)"


def resolve_source_path(source: str, path: str = "auto") -> str:
    """Return the path of `wiki`, `roam` or `primer` with `auto` and `~` resolved.

    The result is `embedded`, `hub` (wiki only), or a path. For roam and primer, `auto` is the default path if it
    exists; otherwise, and always for wiki, it is `embedded`: nothing is downloaded unless the user asks for it.
    """
    if path == "auto":
        default = {"roam": ROAM, "primer": PRIMER}.get(source)
        return default if default is not None and Path(default).exists() else "embedded"
    return str(expand_home(path))


def absolute_path(path: str) -> str:
    """Return a path without `~` and relative parts; words that are no paths (`embedded`, `hub:ID`) unchanged."""
    if path in ("", "auto", "embedded", "hub") or path.startswith("hub:") or is_url(path):
        return path
    return os.path.abspath(expand_home(path))  # noqa: PTH100 (keeps links)


def _absolute_model(name: str) -> str:
    """Return what `init_from` names with an absolute path; a repository of the Hub unchanged."""
    if not is_public(name):
        return absolute_path(name)
    folder = folder_or_id(name)
    return PREFIX + absolute_path(folder) if expand_home(folder).is_dir() else name


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Return the config of a run that works from any folder: `auto` sources are chosen, and paths are absolute."""
    data = config.data
    sources = {
        name: dataclasses.replace(source, path=absolute_path(source.path)) for name, source in data.sources.items()
    }
    splice = config.splice
    if splice.base is not None:
        splice = dataclasses.replace(splice, base=absolute_path(splice.base))
    return dataclasses.replace(
        config,
        init_from=_absolute_model(config.init_from),
        data=dataclasses.replace(
            data,
            wiki=absolute_path(resolve_source_path("wiki", data.wiki)),
            roam=absolute_path(resolve_source_path("roam", data.roam)),
            primer=absolute_path(resolve_source_path("primer", data.primer)),
            cache_dir=absolute_path(data.cache_dir),
            token_cache=absolute_path(data.token_cache),
            sources=sources,
        ),
        splice=splice,
    )


def roam_path(path: str | Path | None = None) -> Path:
    """Return the folder of notes: `path`, or `.roam-data/` if it exists, or the embedded notes."""
    if path is not None:
        return Path(path)
    resolved = resolve_source_path("roam")
    return embedded.NOTES if resolved == "embedded" else Path(resolved)


def primer_path(path: str | Path | None = None) -> Path:
    """Return the file of dialogues: `path`, or `data/primer.txt` if it exists, or the embedded dialogues."""
    if path is not None:
        return Path(path)
    resolved = resolve_source_path("primer")
    return embedded.PRIMER if resolved == "embedded" else Path(resolved)


def display_name(source: str, path: str) -> str:
    """Return the name of a source for tables and messages: `wiki (Python docstrings)` where wiki is embedded.

    `source` may also be the name of a held-out stream (`val_wiki`); `path` is the path in the config.
    """
    is_docstrings = source in ("wiki", "val_wiki") and resolve_source_path("wiki", path) == "embedded"
    return f"{source}{_DOCSTRINGS}" if is_docstrings else source


def source_name(displayed: str) -> str:
    """Return the name of a source that `display_name` shows."""
    return displayed.removesuffix(_DOCSTRINGS)
