"""The docs site in Chromium, from the file system, without a network."""

import pytest

from tests.scripts.test_docs_site import build_site

PAGES = ["index", "first-hour", "how-to/serve", "explanations/masks", "reference/config", "recipes"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build_site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def tab(browser):
    """A page of a phone in dark mode that records what it loads and what goes wrong."""
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme="dark", offline=True)
    page = context.new_page()
    page.loaded, page.errors = [], []
    page.on("request", lambda request: page.loaded.append(request.url))
    page.on("console", lambda message: page.errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    yield page
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_only_files_and_fits_a_phone(site, tab, name):
    tab.goto(f"file://{site}/{name}.html", wait_until="networkidle")
    assert tab.loaded and all(url.startswith("file://") for url in tab.loaded)
    assert tab.errors == []
    assert tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    broken = "[...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)"
    assert tab.evaluate(broken) == []


def test_search_finds_a_page(site, tab):
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.goto(f"file://{site}/index.html")
    tab.locator("input.md-search__input").click()
    tab.keyboard.type("bytes per token of a tokenizer")
    found = tab.locator(".md-search-result__link[href*='how-to/tokenizer.html']")
    found.first.wait_for(timeout=30_000)
    assert tab.errors == []
