"""The docs agree with the code: functions named in the walks exist, links lead somewhere, lines are short."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
STEP = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def definitions(path):
    """Names of functions, classes and methods ("Class.method") of a module."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


def test_functions_of_the_two_walks_exist():
    steps = STEP.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    missing = [(f, name) for f, name in steps if name not in definitions(ROOT / "niels_gpt" / f)]
    assert missing == []
    assert len(steps) > 30


def test_every_package_is_in_the_table_of_layers():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = [p.parent.name + "/" for p in (ROOT / "niels_gpt").glob("*/__init__.py")]
    assert [name for name in packages if f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_of_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    paths = re.findall(r"`((?:docs|configs|bench|tests|scripts|niels_gpt)/[\w/.-]+)`", text)
    missing = [link for link in links if link and not (page.parent / link).exists()]
    if page.name != "lab-notebook.md":  # it names what existed on the day
        missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    limit = 120 if page.name == "README.md" else 200
    assert [number for number, line in enumerate(lines, 1) if len(line) > limit] == []
    assert page.name != "README.md" or len(lines) <= 150
