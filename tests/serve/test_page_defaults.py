"""How the page samples by default."""

import inspect
import re
from pathlib import Path

import niels_gpt.serve
from niels_gpt.cli.chat import chat

CONTROLS = Path(niels_gpt.serve.__file__).parent / "page/static/controls.js"


def test_the_page_samples_as_the_chat_in_the_terminal_does():
    (defaults,) = re.findall(r"DEFAULTS = \{(.*?)\}", CONTROLS.read_text(encoding="utf-8"))
    page = dict(re.findall(r"(\w+): ([\d.]+)", defaults))
    terminal = inspect.signature(chat).parameters
    for name in ("temperature", "top_k"):
        assert float(page[name]) == terminal[name].default
