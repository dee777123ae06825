"""Text that needs no network: the notes and dialogues of the package, and Python's docstrings."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

_HERE = Path(__file__).parent / "texts"
NOTES = _HERE / "notes"
"""A folder of markdown notes about language models, data and this project."""
PRIMER = _HERE / "primer.txt"
"""Dialogues in the transcript format."""
QUESTIONS = _HERE / "questions.jsonl"
"""Questions for a model trained on the dialogues, in other words than theirs: {"topic", "question", "words"}."""


def public_texts() -> Iterator[str]:
    """Yield the notes, dialogues and questions of the package, which everyone has."""
    for path in (*sorted(NOTES.rglob("*.md")), PRIMER, QUESTIONS):
        yield path.read_text(encoding="utf-8")


# Folders without documentation: tests, an editor, old grammars, vendored wheels.
_SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "ensurepip",
         "encodings", "pydoc_data", "__pycache__", "__phello__"}  # fmt: skip


MIN_STDLIB_FILES = 50
"""With fewer files, the sources of the standard library are not installed."""


def stdlib_files() -> list[Path]:
    """Return the source files of the standard library, sorted by path.

    Raises ValueError if Python was installed without them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIP]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(files) < MIN_STDLIB_FILES:
        raise ValueError(f"the sources of the standard library are not in {root}; use --wiki FOLDER")
    return sorted(files)


def stdlib_fingerprint() -> dict[str, str | int]:
    """Return what identifies the docstrings, without reading the files."""
    sizes = [path.stat().st_size for path in stdlib_files()]
    return {"python": sys.version.split()[0], "files": len(sizes), "size": sum(sizes)}


def iter_stdlib() -> Iterator[tuple[str, str]]:
    """Yield (module name, text) per module of the standard library: its docstrings in order. Imports nothing."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in stdlib_files():
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a template or test input that is not valid Python
            continue
        docstrings = _docstrings(tree, name)
        if docstrings:
            yield name, "\n\n".join(docstrings) + "\n"


def _docstrings(tree: ast.Module, module: str) -> list[str]:
    """Return the docstrings of a module, each under its dotted name; skip those under 40 characters."""
    docstrings = []
    stack: list[tuple[str, ast.AST]] = [(module, tree)]
    while stack:
        name, node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            raw = ast.get_docstring(node, clean=False)
            text = inspect.cleandoc(raw) if raw else ""
            if len(text) >= 40:
                docstrings.append(f"{name}\n{text}")
            inner = [n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
            stack += [(f"{name}.{n.name}", n) for n in reversed(inner)]
    return docstrings
