"""The parts of the memorisation report that show text: passages, whole documents in colour, definitions."""

from __future__ import annotations

from typing import Any

from niels_gpt.report.html import (
    escape,
    heat_bar,
    heat_key,
    heat_spans,
    one_in,
    paragraph,
    percent,
)

_MOST_PASSAGES = 40
_MOST_CHARACTERS = 2_000_000
_OPEN_CHARACTERS = 2_500


def passages(found: list[dict[str, Any]]) -> list[str]:
    """The likeliest windows with their text."""
    if not found:
        return []
    parts = [
        "<h2>Strongest passages</h2>",
        paragraph("The prompt is grey; after it comes what the model was to say, in the colour of P(z)."),
        heat_key(),
    ]
    for rank, passage in enumerate(found[:_MOST_PASSAGES], start=1):
        suffix = heat_spans(passage["suffix"], [passage["p"]] * len(passage["suffix"]))
        kind = " (control)" if passage["control"] else ""
        parts.append(
            f'<article class="passage"><header>{rank}. <b>{percent(passage["p"])}</b>, {one_in(passage["log_p"])} '
            f'<span class="soft">{escape(passage["document"])}{kind}, {passage["start"]:,} to {passage["end"]:,}</span>'
            f'</header><div class="text" dir="auto"><span class="prompt">{escape(passage["prompt"])}</span>{suffix}'
            "</div></article>"
        )
    if len(found) > _MOST_PASSAGES:
        parts.append(paragraph(f"{len(found) - _MOST_PASSAGES:,} more are in the JSON file.", kind="soft"))
    return parts


def strips(report: dict[str, Any]) -> list[str]:
    """Every document, its characters coloured by the largest P(z) of a window that covers them."""
    if not report["strips"]:
        return []
    what = "whose suffix covers it" if report["settings"]["map"] == "suffix" else "that covers it"
    parts = [
        "<h2>Where in the text</h2>",
        paragraph(
            f"Each character has the colour of the largest P(z) among the windows {what}; hover to see the number."
        ),
        heat_key(),
    ]
    room, opened = _MOST_CHARACTERS, False
    for number, strip in enumerate(report["strips"]):
        room -= len(strip["text"])
        if room < 0 and number:
            parts.append(paragraph(f"{len(report['strips']) - number:,} more are in the JSON file.", kind="soft"))
            break
        kind = "control, " if strip["control"] else ""
        small = not opened and len(strip["text"]) <= _OPEN_CHARACTERS
        opened = opened or small
        parts.append(
            f"<details{' open' if small else ''}><summary><b>{escape(strip['document'])}</b> "
            f'<span class="soft">{kind}{len(strip["text"]):,} characters</span>{heat_bar(strip["p"])}</summary>'
            f'<div class="text" dir="auto">{heat_spans(strip["text"], strip["p"])}</div></details>'
        )
    return parts


def how_to_read(settings: dict[str, Any], unit: str) -> list[str]:
    """What the words on the page mean."""
    window, prompt, greedy = settings["window"], settings["prompt"], settings["greedy"]
    if settings["map"] == "suffix":
        colours = f"the first {prompt} {unit} of a document lie in no suffix, so they stay without colour."
    else:
        colours = "a character counts in the prompt of a window as well as in its suffix."
    terms = {
        "Window z": f"{window} {unit} of a document: the first {prompt} are the prompt, the other {window - prompt} "
        f"the suffix. Windows start every {settings['stride']} {unit}, and one ends where the document ends. A "
        "document shorter than a window is one window, its prompt shortened in proportion.",
        "P(z)": "the probability that the model, given the prompt, goes on with exactly this suffix: the product of "
        "the probabilities of its tokens at temperature 1, over the whole vocabulary. “1 in N” says that one sample "
        "in N is the suffix.",
        "Memorised": "P(z) of at least 50%, as is usual in the field.",
        "Control": "documents that were never trained on. Some text can be guessed (lists, quotations, boilerplate); "
        "what training added is the gap to the controls.",
        "Mean and geometric mean": "the mean of P(z) is governed by the few strongest windows, the geometric mean (the "
        "exponential of the mean of log P(z)) by the many weak ones.",
        "Sampling n times": "the chance to see z at least once in n samples is 1 - (1 - P(z))ⁿ.",
        "Greedy": f"after a prompt of {greedy} {unit}, the likeliest next {unit[:-1]}, {greedy} times: the share equal "
        "to the text, and how many continuations are equal from beginning to end.",
        "Longest verbatim run": "for how long greedy decoding stays on the text, from the best start.",
        "Loss": f"the mean of -log p of the next {unit[:-1]}, in nats; bits per byte makes tokenizers comparable.",
        "Colours": colours,
    }
    if not greedy:
        del terms["Greedy"], terms["Longest verbatim run"]
    entries = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in terms.items())
    return ["<h2>How to read this</h2>", f"<dl>{entries}</dl>"]
