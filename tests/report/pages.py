"""Read a page back: check that its tags are balanced and that it loads nothing, and return its texts."""

from html.parser import HTMLParser

VOID = {"br", "meta"}
EMPTY = {"path", "circle", "rect"}
"""SVG elements that are self-closing."""
LOADING = {"src", "href", "xlink:href", "srcset", "action", "data", "poster", "background", "onload", "onerror"}


class Page(HTMLParser):
    """The elements of a page as (tag, attributes, text inside, tags around)."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.elements = [], []
        self.feed(str(html))
        self.close()
        assert not self.open, f"never closed: {[tag for tag, *_ in self.open]}"

    def handle_starttag(self, tag, attrs):
        assert tag not in EMPTY, f"<{tag}> is not self-closing"
        element = [tag, dict(attrs), "", [t for t, *_ in self.open]]
        assert len(element[1]) == len(attrs), f"duplicate attribute: {attrs}"
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        assert tag in EMPTY, f"<{tag}/>"
        self.elements.append([tag, dict(attrs), "", [t for t, *_ in self.open]])

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data):
        for element in self.open:
            element[2] += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data}")

    def all(self, tag, kind=None):
        """Return (attributes, text) of the elements of a tag (and a class)."""
        return [
            (a, text) for t, a, text, _ in self.elements if t == tag and kind in (None, *a.get("class", "").split())
        ]

    def texts(self, tag, kind=None):
        """Return the texts of the elements of a tag."""
        return [text for _, text in self.all(tag, kind)]


def read(html):
    """Parse a page and check that it is well formed and self-contained."""
    assert html.startswith("<!DOCTYPE html>\n")
    html.encode("utf-8")
    page = Page(html)
    tags = [tag for tag, *_ in page.elements]
    for tag, attributes, *_ in page.elements:
        assert not LOADING & set(attributes), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert not {"link", "img", "iframe", "object", "embed", "base", "image", "use", "a", "form", "b0"} & set(tags)
    for once in ("html", "head", "body", "title", "style", "script"):
        outside = [t for t, _, _, around in page.elements if t == once and "svg" not in around]
        assert len(outside) == 1, once
    [style], [script] = page.texts("style"), page.texts("script")
    for code in (style, script):
        assert "http" not in code and "url(" not in code and "@import" not in code and "//" not in code
    return page
