"""How large the package is and how its files hang together, against `scripts/budget.json`: part of `make check`.

Per package: lines of code, without blanks, comments and docstrings, of files as ruff formats them. In total: files,
`raise` statements, circles of files (imports inside functions and for typing count), files below `cli/` that import
typer or call `sys.exit`, functions with more than 12 parameters outside of `kernels/`, and blocks of six lines that
occur twice. A number above its budget fails; the budget file says what it may be.

    python -m scripts.structure           compare
    python -m scripts.structure --lower   lower each budget to its number; none is raised
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "niels_gpt"
BUDGET = Path(__file__).with_name("budget.json")
MOST_PARAMETERS = 12
BLOCK = 6
"""Lines of a repeated block."""
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> list[str]:
    """The lines with code, stripped."""
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            used.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):  # a docstring
                used.difference_update(range(value.lineno, (value.end_lineno or 0) + 1))
    lines = source.split("\n")
    return [lines[number - 1].strip() for number in sorted(used)]


def module_name(path: Path) -> str:
    """`niels_gpt.cli.main` of a path relative to the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST, known: set[str]) -> set[str]:
    """The modules among `known` that a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= members & known or {node.module}
    return found & known


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other: what is left when modules without arrows in or out are removed."""
    left = {name: targets - {name} for name, targets in arrows.items()}
    while True:
        reached = set().union(*left.values()) if left else set()
        kept = {name for name, targets in left.items() if targets & left.keys() and name in reached}
        if kept == left.keys():
            break
        left = {name: left[name] & kept for name in kept}
    groups: list[list[str]] = []
    while left:
        start = min(left)
        group = {name for name in _reach(left, start) if start in _reach(left, name)} | {start}
        if len(group) > 1:
            groups.append(sorted(group))
        left = {name: targets - group for name, targets in left.items() if name not in group}
    return groups


def _reach(arrows: dict[str, set[str]], start: str) -> set[str]:
    seen, todo = set[str](), [start]
    while todo:
        for target in arrows.get(todo.pop(), ()):
            if target not in seen:
                seen.add(target)
                todo.append(target)
    return seen


def repeated_blocks(files: list[list[str]]) -> int:
    """How many blocks of code lines occur again, in the same file or another one; imports do not count."""
    seen: Counter[tuple[str, ...]] = Counter()
    for lines in files:
        lines = [line for line in lines if not line.startswith(("import ", "from "))]
        seen.update(tuple(lines[i : i + BLOCK]) for i in range(len(lines) - BLOCK + 1))
    return sum(number - 1 for number in seen.values() if number > 1)


def measure(root: Path) -> dict[str, int]:
    """All numbers of the package below a folder."""
    paths = [path.relative_to(root) for path in sorted((root / PACKAGE).rglob("*.py"))]
    sources = {path: (root / path).read_text(encoding="utf-8") for path in paths}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    code = {path: code_lines(source) for path, source in sources.items()}
    known = {module_name(path) for path in paths}
    packages = {module_name(path) for path in paths if path.name == "__init__.py"}
    arrows = {
        module_name(path): imports(tree, known) - packages
        for path, tree in trees.items()
        if module_name(path) not in packages
    }
    below_cli = {path: tree for path, tree in trees.items() if path.parts[1] not in ("cli", "__main__.py")}
    found: Counter[str] = Counter(
        {
            "files": len(paths),
            "raise statements": sum(isinstance(node, ast.Raise) for tree in trees.values() for node in ast.walk(tree)),
            "circles of files": len(circles(arrows)),
            "typer below cli": sum(_imports_typer(tree) for tree in below_cli.values()),
            "sys.exit below cli": sum(ast.unparse(node) == "sys.exit" for node in _attributes(below_cli)),
            "functions of many parameters": sum(map(_has_many_parameters, _functions(trees))),
            "repeated blocks": repeated_blocks(list(code.values())),
        }
    )
    for path, lines in code.items():
        found[f"lines of {path.parts[1] if len(path.parts) > 2 else 'the root'}"] += len(lines)
        found["lines"] += len(lines)
    return dict(sorted(found.items()))


def _imports_typer(tree: ast.AST) -> bool:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return any(name.split(".")[0] in ("typer", "click") for name in names)


def _attributes(trees: dict[Path, ast.Module]) -> Iterator[ast.Attribute]:
    for tree in trees.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def _functions(trees: dict[Path, ast.Module]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for path, tree in trees.items():
        if path.parts[1] != "kernels":
            yield from (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def _has_many_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    given = function.args
    return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) > MOST_PARAMETERS


def main(words: list[str]) -> int:
    """Compare with the budget, or lower it; the exit code."""
    found = measure(ROOT)
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))
    if words == ["--lower"]:
        lowered = {name: min(number, budget.get(name, number)) for name, number in found.items()}
        BUDGET.write_text(json.dumps(lowered, indent=2) + "\n", encoding="utf-8")
        return 0
    above = {name: number for name, number in found.items() if number > budget.get(name, 0)}
    for name, number in above.items():
        print(f"{name}: {number}, the budget is {budget.get(name, 0)}: remove as much as was added (CONTRIBUTING.md)")
    print(f"structure: {found['lines']:,} lines of code in {found['files']} files, {len(above)} above their budget")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
