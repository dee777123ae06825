"""The docs site: links that work on GitHub work in it, and it loads nothing from other hosts."""

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts.docs_site import ROOT, ROOT_PAGES, site_link, site_markdown

MKDOCS = ROOT / ".venv-tools" / "bin" / "python"
LOADED = {"script": ("src",), "img": ("src", "srcset"), "source": ("src", "srcset"), "iframe": ("src",)}
LOADED |= {"video": ("src", "poster"), "audio": ("src",), "embed": ("src",), "object": ("data",), "image": ("href",)}
LOADED |= {"link": ("href",), "use": ("href",)}
NOT_LOADED = {"canonical", "prev", "next", "author", "license"}
"""Values of <link rel> that name another page instead of a resource."""


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("README.md", "docs/api.md", "api.md"),
        ("README.md", "docs/data-flow.png", "data-flow.png"),
        ("README.md", "CHANGELOG.md", "changelog.md"),
        ("CONTRIBUTING.md", "docs/lab-notebook.md", "lab-notebook.md"),
        ("docs/api.md", "../CHANGELOG.md", "changelog.md"),
        ("docs/api.md", "#public-names", "#public-names"),
        ("docs/how-to/serve.md", "../runs.md#in-the-browser", "../runs.md#in-the-browser"),
        ("docs/how-to/publish.md", "../../CONTRIBUTING.md", "../contributing.md"),
        ("docs/how-to/publish.md", "../../README.md#more", "../index.md#more"),
        ("docs/notes.md", "https://example.org/docs/a.md", "https://example.org/docs/a.md"),
        (
            "docs/memorization.md",
            "../niels_gpt/memorization/measure.py",
            "https://github.com/niels-gpt/niels-gpt/blob/main/niels_gpt/memorization/measure.py",
        ),
    ],
)
def test_links_of_github_become_links_of_the_site(page, link, expected):
    assert site_link(link, page) == expected


def test_a_link_to_a_missing_file_names_page_and_file():
    with pytest.raises(ValueError, match=r"docs/notes\.md.*docs/missing\.md"):
        site_link("missing.md", "docs/notes.md")


def test_code_blocks_are_kept():
    text = "[a](docs/api.md)\n```md\n[a](docs/api.md)\n```\n[a](docs/runs.md)\n"
    assert site_markdown(text, "README.md") == "[a](api.md)\n```md\n[a](docs/api.md)\n```\n[a](runs.md)\n"


class Resources(HTMLParser):
    """Collects what a browser loads for a page, and the targets of its links."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag == "link" and NOT_LOADED & set((values.get("rel") or "").split()):
            return
        self.loaded += [values[name] or "" for name in LOADED.get(tag, ()) if name in values]
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])


def test_the_parser_finds_resources():
    html = '<link rel=icon href="https://a/i"><link rel=canonical href="https://b/"><script src=//c/s.js></script>'
    assert Resources(html + "<img src=d.png><a href=e.html>").loaded == ["https://a/i", "//c/s.js", "d.png"]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


def build_site(folder: Path) -> Path:
    """Build the site into a folder, as `make docs` does."""
    if not MKDOCS.exists():
        pytest.skip("no .venv-tools: make test WHAT=docs sets it up")
    command = [MKDOCS, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_built(site):
    sources = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages = {Path(name).with_suffix(".html").as_posix() for name in sources | set(ROOT_PAGES.values())}
    assert pages - {path.relative_to(site).as_posix() for path in site.rglob("*.html")} == set()


@pytest.mark.slow
def test_the_site_loads_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    for page in pages:
        html = page.read_text(encoding="utf-8")
        found = Resources(html)
        for target in found.loaded:
            if target.startswith("data:"):
                continue
            assert not re.match(r"[a-z]+:|//", target), f"{page.name} loads {target}"
            path = target.partition("?")[0].partition("#")[0]
            parent = site if path.startswith("/") else page.parent  # 404.html
            assert (parent / path.lstrip("/")).exists(), f"{page.name} loads {target}, which does not exist"
        assert "mermaid" not in re.findall(r'class="(\w+)"', html)  # the theme would load it from a CDN
        assert 'data-md-component="source"' not in html  # the theme would ask api.github.com
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles and not any(re.search(r"url\([\"']?(https?:|//)|@import", style) for style in styles)


@pytest.mark.slow
def test_links_of_the_readme_lead_to_pages_of_the_site(site):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = Resources((site / "index.html").read_text(encoding="utf-8")).links
    for name in re.findall(r"\]\(docs/([\w/-]+)\.md", readme):
        assert f"{name}.html" in links and (site / f"{name}.html").exists()


@pytest.mark.slow
def test_the_reference_has_signatures_and_docstrings(site):
    html = (site / "reference" / "model.html").read_text(encoding="utf-8")
    assert 'id="niels_gpt.model.gpt.GPT"' in html and 'id="niels_gpt.model.gpt.GPT.forward"' in html
    assert "Decoder-only transformer over token ids" in html
