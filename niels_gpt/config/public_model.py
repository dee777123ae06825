"""How `init_from`, `--base` and `import hf` name a public model: `hf:` with a folder or a repository of the Hub."""

from __future__ import annotations

PREFIX = "hf:"


def is_public(name: str) -> bool:
    """Whether a name is that of a public model, not of a run or checkpoint."""
    return name.startswith(PREFIX)


def folder_or_id(name: str) -> str:
    """The folder or repository of a public model, whose name may lack `hf:`. Raises ValueError if it is empty."""
    named = name.removeprefix(PREFIX)
    if not named.strip():  # as a path, it would be the working directory
        raise ValueError(f"{name!r} names no model: name a folder, or a repository of the Hub (NAME/MODEL)")
    return named
