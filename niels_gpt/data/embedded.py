"""Text that is there without a network: shipped notes and dialogues, and Python's own docstrings."""

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

# Not prose about the library: tests, an editor, grammars of old Pythons, vendored wheels.
_SKIP = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "ensurepip",
         "encodings", "pydoc_data", "__pycache__", "__phello__"}  # fmt: skip


def stdlib_files() -> list[Path]:
    """The source files of the standard library, sorted by their path within it.

    Raises ValueError where Python was installed without them.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIP]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if len(files) < 50:
        raise ValueError(f"the sources of the standard library are not in {root}; give --wiki FOLDER instead")
    return sorted(files)


def stdlib_fingerprint() -> dict[str, str | int]:
    """What the docstrings depend on, without reading them."""
    sizes = [path.stat().st_size for path in stdlib_files()]
    return {"python": sys.version.split()[0], "files": len(sizes), "size": sum(sizes)}


def stdlib_documents() -> list[tuple[str, str]]:
    """All that `iter_stdlib` gives."""
    return list(iter_stdlib())


def iter_stdlib() -> Iterator[tuple[str, str]]:
    """(module name, text) per module of the standard library: its docstrings in order, nothing imported."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in stdlib_files():
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a template or a test input that is no Python
            continue
        parts = _docstrings(tree, name)
        if parts:
            yield name, "\n\n".join(parts) + "\n"


def _docstrings(tree: ast.Module, module: str) -> list[str]:
    """The docstrings of a module, each under its dotted name; those under 40 letters are not text."""
    parts = []
    stack: list[tuple[str, ast.AST]] = [(module, tree)]
    while stack:
        name, node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            raw = ast.get_docstring(node, clean=False)
            text = inspect.cleandoc(raw) if raw else ""
            if len(text) >= 40:
                parts.append(f"{name}\n{text}")
            inner = [n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
            stack += [(f"{name}.{n.name}", n) for n in reversed(inner)]
    return parts
