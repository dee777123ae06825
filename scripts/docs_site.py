"""Hooks of mkdocs (mkdocs.yml): pages of the root, and links that work both on GitHub and in the site.

README.md, CHANGELOG.md, CONTRIBUTING.md and SECURITY.md become pages. Links are written for GitHub, relative to the
file; those to another page are rewritten for the site, and those to any other file of the repository lead to GitHub.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/niels-gpt/niels-gpt/blob/main"
ROOT_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""File of the root -> page of the site."""
ICON = "niels_gpt/serve/page/static/icon.svg"
LINK = re.compile(r"(\]\()([^)\s]+)(?=\))")


def site_link(link: str, page: str) -> str:
    """Return a link of a page for the site; `page` is its path in the repository, e.g. `docs/notes.md`.

    Raises ValueError for a file that does not exist.
    """
    path, hash_mark, anchor = link.partition("#")
    if not path or "://" in link or link.startswith("mailto:"):
        return link
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    if not (ROOT / target).exists():
        raise ValueError(f"{page}: link to {link}, but the repository has no {target}")
    if target in ROOT_PAGES:
        path = f"docs/{ROOT_PAGES[target]}"
    elif target.startswith("docs/"):
        path = target
    else:
        return f"{REPOSITORY}/{target}{hash_mark}{anchor}"
    own = f"docs/{ROOT_PAGES[page]}" if page in ROOT_PAGES else page
    return posixpath.relpath(path, posixpath.dirname(own)) + hash_mark + anchor


def site_markdown(markdown: str, page: str) -> str:
    """Return the Markdown of a page with its links rewritten, except in code blocks. Raises as `site_link` does."""
    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.MULTILINE | re.DOTALL)
    for i in range(0, len(parts), 2):
        parts[i] = LINK.sub(lambda match: match[1] + site_link(match[2], page), parts[i])
    return "".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and the icon of the served page."""
    from mkdocs.structure.files import File

    for name, uri in (*ROOT_PAGES.items(), (ICON, "assets/icon.svg")):
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page; a page that is alone in its tab gets the width of the navigation."""
    from mkdocs.exceptions import PluginError

    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    named = {page: name for name, page in ROOT_PAGES.items()}
    try:
        return site_markdown(markdown, named.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    except ValueError as err:
        raise PluginError(str(err)) from err
