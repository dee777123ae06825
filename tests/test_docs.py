"""The docs agree with the code: walks, examples, figures and reference; links lead somewhere, lines are short."""

import importlib
import io
import json
import re
import sys
from pathlib import Path

import pytest

import niels_gpt
from bench import figures
from niels_gpt.data import embedded
from niels_gpt.report import curves
from scripts import draw_docs_figures
from tests.cli import call
from tests.training import write_texts

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
STEP = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def calls(wanted, *command):
    """The functions of `wanted`, (file, qualified name), in the order in which a command calls them."""
    folder, seen = f"{ROOT / 'niels_gpt'}/", []

    def profile(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            function = (code.co_filename.removeprefix(folder), code.co_qualname)
            if function in wanted:
                seen.append(function)

    sys.setprofile(profile)
    try:
        assert call(*command) == 0
    finally:
        sys.setprofile(None)
    return seen


def test_the_two_walks_list_functions_in_the_order_in_which_they_run(tmp_path, monkeypatch):
    training, chat = (
        STEP.findall(part)
        for part in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("\n## Walk ")[1:]
    )
    assert len(training) > 20 and len(chat) > 10
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(curves, "plot_losses", lambda run: None)
    write_texts(tmp_path)
    small = ["--steps=1", "--set=model={T: 64, C: 16, L: 1, H: 2}", "--set=train.warmup_steps=0", "--set=train.B=2"]
    shares = [f"--set=train.{key}={{roam: 1.0}}" for key in ("p_train", "p_val")]
    options = [*small, *shares, "--set=output.eval_steps=1", "--set=output.sample_tokens=1", "--device=cpu"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/exit\n"))
    for walk, command in (
        (training, ["train", "--roam", "notes", "--run-dir", "run", *options]),
        (chat, ["chat", "--run", "run", "--max-tokens", "5", "--device", "cpu"]),
    ):
        seen = iter(calls(set(walk), *command))
        assert [step for step in walk if step not in seen] == []  # `in` consumes: a function must come after the last


def test_every_package_is_in_the_table_of_layers():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = [p.parent.name + "/" for p in (ROOT / "niels_gpt").glob("*/__init__.py")]
    assert [name for name in packages if f"`{name}`" not in text] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs/explanations").glob("*.md")), ids=lambda page: page.stem)
def test_examples_of_an_explanation_run(page):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks and all("assert " in block for block in blocks)
    for block in blocks:
        exec(compile(block, page.name, "exec"), {})


def test_figures_are_those_that_the_script_draws(tmp_path):
    """Compare their texts: coordinates differ between versions of matplotlib."""
    drawn = {path.name: path.read_text(encoding="utf-8") for path in draw_docs_figures.draw(tmp_path)}
    stored = {path.name: path.read_text(encoding="utf-8") for path in draw_docs_figures.FOLDER.iterdir()}
    text = re.compile(r"<text[^>]*>([^<]*)")
    assert {name: text.findall(svg) for name, svg in drawn.items()} == {
        name: text.findall(svg) for name, svg in stored.items()
    }
    for svg in drawn.values():  # every color has a dark value
        assert set(re.findall(r"(?:fill|stroke): (#\w+)", svg)) == set()


def test_reference_has_every_public_name_where_it_is_defined():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    entries = [line for page in pages for line in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.M)]
    assert len(entries) == len(set(entries))
    public = {getattr(niels_gpt, name) for name in niels_gpt.__all__ if name != "__version__"}
    assert {f"{value.__module__}.{value.__qualname__}" for value in public} - set(entries) == set()
    for entry in entries:
        module, _, name = entry.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        assert f"{value.__module__}.{value.__qualname__}" == entry


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_of_a_page_exist(page):
    text = page.read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    paths = re.findall(r"`((?:docs|configs|bench|tests|scripts|niels_gpt)/[\w/.-]+)`", text)
    missing = [link for link in links if link and not (page.parent / link).exists()]
    if not page.name.startswith("lab-notebook"):  # they name what existed on the day
        missing += [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_are_short(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    limit = 120 if page.name in ("README.md", "first-hour.md") or page.parent.parent == ROOT / "docs" else 200
    assert [number for number, line in enumerate(lines, 1) if len(line) > limit] == []
    assert page.name != "README.md" or len(lines) <= 150


def test_figures_in_the_pages_are_the_stored_ones():
    """`python -m bench.figures` fills them in."""
    stored = json.loads(figures.STORED.read_text(encoding="utf-8"))
    marked = {page: figures.MARK.findall(page.read_text(encoding="utf-8")) for page in figures.pages()}
    assert sum(map(len, marked.values())) > 15 and marked[ROOT / "README.md"]
    for page, found in marked.items():
        for name, value in found:
            entry, key = name.split(".")
            assert stored[entry]["figures"][key] == value, (page.name, name)
    assert all(entry["date"] and entry["machine"] for entry in stored.values())
    text = "a <!--=demo.bits-->9<!--=--> b <!--=past_T.v1--><!--=-->"
    bits, slower = stored["demo"]["figures"]["bits"], stored["past_T"]["figures"]["v1"]
    assert figures.filled(text, stored) == f"a <!--=demo.bits-->{bits}<!--=--> b <!--=past_T.v1-->{slower}<!--=-->"


def test_the_question_of_the_readme_is_new_and_its_answer_is_the_measured_one():
    chat = re.search(r"^you> (.*)\n(niels> .*)$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    stored = json.loads(figures.STORED.read_text(encoding="utf-8"))
    assert chat[1] == figures.SHOWCASE and chat[2] == stored["demo"]["figures"]["showcase"]
    assert "cannot forget" in chat[2]
    asked = re.findall(r"^user: (.*)$", embedded.PRIMER.read_text(encoding="utf-8"), re.MULTILINE)
    words = {" ".join(re.findall(r"\w+", question.lower())) for question in asked}
    assert len(words) > 9000 and " ".join(re.findall(r"\w+", chat[1].lower())) not in words
