"""A real server and a real Chromium. Screenshots of every view are written to the folder of artefacts."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from niels_gpt.serve.limits import Limits
from niels_gpt.serve.page_routes import PAGE_ROUTERS, STATIC
from niels_gpt.serve.served_model import load_models
from tests.cli import reciting
from tests.inference.models import spread_model, token_model
from tests.serve.conftest import cycle_model, running, served
from tests.token_caches import tokenizer

if find_spec("playwright") is None:  # make test WHAT=browser installs it
    collect_ignore_glob = ["test_*.py"]

CHROMIUM = os.environ.get("NIELS_GPT_CHROMIUM", "/usr/bin/chromium")
ARTEFACTS = Path(os.environ.get("NIELS_GPT_ARTEFACTS", Path(__file__).parent / "artefacts"))
SCRIPT = "<script>document.title='ran'</script>"
IMAGE = "<img src=x onerror=\"document.title='ran'\">"
WAIT_MS = 30_000
LONGEST = 100_000
"""Tokens of a reply that goes on until a test ends it, also on a fast machine."""
LIMITS = Limits(slots=4, queue=4, choices=8, request_seconds=600.0, new_tokens=LONGEST, alternatives=10**8)


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)


def looping_model(text, T=512):
    """A byte model that writes a text again and again, whatever the prompt; the bytes of the text may repeat.

    It knows the position in the text only by counting, so a reply starts where the prompt's length says.
    """
    import torch

    from niels_gpt import GPT, ModelConfig

    data = text.encode()
    torch.manual_seed(1)
    model = GPT(ModelConfig(V=256, T=T, C=128, L=1, H=1, dropout=0.0, tie_embeddings=False, positions="learned"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                p.zero_()  # the blocks add nothing
        model.tok_emb.weight.zero_()
        places = torch.nn.init.orthogonal_(torch.empty(len(data), 128))
        model.lm_head.weight.zero_()
        for position in range(T):
            model.pos_emb.weight[position] = places[position % len(data)]
        for i, following in enumerate(data):
            model.lm_head.weight[following] += 20 * places[i]
    return model.eval()


@pytest.fixture(scope="session")
def server():
    """Random models under the names of a pretrained and a chat model, one that writes HTML, and a run that recites."""
    models = [
        served("pretrain", spread_model(T=512, dropout=0.0), limits=LIMITS),
        served("sft", token_model(T=256), tokenizer(), limits=LIMITS),
        served("html", looping_model(f"{SCRIPT} {IMAGE} "), limits=LIMITS),
        served("cycle", cycle_model(), limits=LIMITS),
        *load_models([reciting.folder() / "run"], LIMITS, device="cpu"),
    ]
    with running(models, limits=LIMITS, routers=PAGE_ROUTERS, static=STATIC) as found:
        yield found


@pytest.fixture(scope="session")
def browser():
    if not Path(CHROMIUM).exists():
        pytest.skip(f"{CHROMIUM} is not installed: make test WHAT=browser installs it")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        args = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=args)
        yield found
        found.close()


class Opened:
    """A page of the server. Requests to any other host are cut off, and every problem is noted."""

    def __init__(self, browser, server, **options):
        self.problems = []
        self.requests = []
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
        self.context.route(lambda url: not url.startswith((server.url, "blob:", "data:")), self._cut_off)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.page.on("pageerror", lambda err: self.problems.append(f"error: {err}"))
        self.page.on("console", self._console)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.url = server.url

    def _cut_off(self, route):
        self.problems.append(f"asked for {route.request.url}")
        route.abort()

    def _console(self, message):
        if message.type in ("error", "warning"):
            self.problems.append(f"console: {message.text}")

    def open(self, view="chat"):
        self.page.goto(f"{self.url}/#/{view}")
        return self.page

    def picture(self, name):
        ARTEFACTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=ARTEFACTS / f"{name}.png")


@pytest.fixture
def opened(browser, server):
    """Opens pages; after the test, none of them may have had a problem."""
    pages = []

    def make(**options):
        pages.append(Opened(browser, server, **options))
        return pages[-1]

    yield make
    for each in pages:
        each.context.close()
    assert [problem for each in pages for problem in each.problems] == []
