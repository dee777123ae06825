"""Figures in README and docs: measure them, and write them where the pages mark them.

    python -m bench.figures                     # fill in README.md and docs/ from bench/figures.json
    python -m bench.figures record demo help past_T
    python -m bench.figures record notes ~/notes    # what `niels-gpt notes` prints about a folder, as `notes`
    python -m bench.figures record compressors ~/notes    # with PPMd and zpaq, if they are installed

A page marks a figure as `<!--=demo.time-->5:47<!--=-->`; `make test` compares all of them with bench/figures.json.
Record on a quiet machine: times are wall-clock times, except for `help`.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import commands
from bench.peers import ROOT
from bench.report import machine

STORED = ROOT / "bench" / "figures.json"
MARK = re.compile(r"<!--=([\w.]+)-->(.*?)<!--=-->", re.DOTALL)
SHOWCASE = "can i delete one page from the model afterwards?"
"""The question of README, which no dialogue of the package has."""
PRINTED = (
    re.compile(r"(\d+) of (\d+) by heading, (\d+) of \d+ in other words; (\d+%) with equal weight"),
    re.compile(r"\(([\d.]+%) if notes that share text"),
    re.compile(r"taught ([\d,]+) topics? of ([\d,]+) notes"),
)
"""What `niels-gpt notes` prints about answers, about the split, and about topics."""


def pages() -> list[Path]:
    """The pages that may have figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str, stored: dict[str, Any]) -> str:
    """Return a page with the stored figures. Raises KeyError for a figure that is not stored."""

    def figure(match: re.Match[str]) -> str:
        name, key = match[1].split(".")
        return f"<!--={match[1]}-->{stored[name]['figures'][key]}<!--=-->"

    return MARK.sub(figure, text)


def _niels_gpt(*words: str, stdin: str = "") -> str:
    command = [sys.executable, "-m", "niels_gpt", *words]
    return subprocess.run(command, input=stdin, stdout=subprocess.PIPE, text=True, check=True).stdout


def _scores(run: Path) -> dict[str, str]:
    score = json.loads(_niels_gpt("eval", str(run), "--json"))["scores"]["val_roam"]
    found = {"bits": score["bits_per_byte"]}
    for name, bits in score["baselines"].items():
        found |= {f"{name}_{kind}": value for kind, value in bits.items()}
    return {key: f"{value:.3f}" for key, value in found.items()} | {
        "bytes": f"{score['bytes']:,}",
        "lines_in_training": f"{score['held_out_lines_in_training']:.1%}",
    }


def measure_demo() -> dict[str, str]:
    """Return time, scores and answers of a new demo."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "demo")
        began = time.perf_counter()
        _niels_gpt("demo", "--run-dir", str(run))
        seconds = round(time.perf_counter() - began)
        asked = json.loads(_niels_gpt("eval", str(run), "--questions", "--json"))
        replies = _niels_gpt("chat", str(run), "--temperature", "0", stdin=f"{SHOWCASE}\n/exit\n").splitlines()
        answers = asked["answers"]
        return _scores(run / "pretrain") | {
            "time": f"{seconds // 60}:{seconds % 60:02}",
            "questions": str(len(answers)),
            "right": str(sum(answer["on_topic"] for answer in answers)),
            "share": f"{asked['on_topic']:.0%}",
            "second_share": f"{asked['second_on_topic']:.0%}",
            "showcase": next(line for line in replies if line.startswith("niels>")),
        }


def measure_notes(notes: Path) -> dict[str, str]:
    """Return time, scores and answers of `niels-gpt notes` with a folder."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "notes")
        began = time.perf_counter()
        printed = _niels_gpt("notes", str(notes), "--run-dir", str(run))
        minutes = (time.perf_counter() - began) / 60
        asked, before, taught = (pattern.search(printed) for pattern in PRINTED)
        assert asked and before and taught, printed
        return _scores(run / "pretrain") | {
            "minutes": f"{minutes:.0f}",
            "by_heading": asked[1],
            "asked": asked[2],
            "other_words": asked[3],
            "share": asked[4],
            "topics": taught[1],
            "lines_in_training_by_file": before[1],
        }


def measure_compressors(notes: Path) -> dict[str, str]:
    """Return bits per byte of the held-out notes of a folder by the compressors on the PATH."""
    from bench.compressors import programs
    from niels_gpt.config import NotesConfig
    from niels_gpt.evaluation.baselines import compressed_bits
    from niels_gpt.workflow.chat_model import read_corpus

    corpus = read_corpus(notes, NotesConfig(formats="text"), errors="skip")
    train, held_out = (
        "\n".join(text for _, text in corpus.texts(half)).encode() for half in (corpus.train, corpus.held_out)
    )
    found = compressed_bits(held_out, train=train, using=programs())
    return {f"{name.split()[0]}_{kind}": f"{value:.3f}" for name, bits in found.items() for kind, value in bits.items()}


def measure_help() -> dict[str, str]:
    """Return the median CPU time of `niels-gpt --help` in new processes, which other work hardly changes."""
    return {"ms": f"{1000 * statistics.median(commands.run(['--help']).cpu_seconds for _ in range(15)):.0f}"}


def measure_past_T() -> dict[str, str]:
    """Return how many times slower `generate` is past T tokens, where it computes the window again for each token."""
    import torch

    from bench import models
    from bench.generation import Ids
    from niels_gpt import generate

    found = {}
    for name, size in (("v0", models.V0), ("v1", models.V1)):
        model = models.niels_gpt(size)
        half, tokenizer = model.config.T // 2, Ids(model.config.V)

        def per_token(prompt: int, new: int, model: Any = model, tokenizer: Any = tokenizer) -> float:
            draw, began = torch.Generator().manual_seed(0), time.perf_counter()
            generate(model, "a" * prompt, max_new_tokens=new, generator=draw, tokenizer=tokenizer)
            return (time.perf_counter() - began) / new

        rounds = [per_token(2 * half, 8) / per_token(half, half) for _ in range(3)]
        found[name] = f"{statistics.median(rounds):.0f}"
    return found


MEASURES: dict[str, Callable[..., dict[str, str]]] = {
    "demo": measure_demo,
    "notes": measure_notes,
    "compressors": measure_compressors,
    "help": measure_help,
    "past_T": measure_past_T,
}


def record(names: Sequence[str]) -> Iterator[str]:
    """Measure and store; `notes` and `compressors` are followed by a folder. Yields the names as they are done."""
    words = iter(names)
    for name in words:
        arguments = [Path(next(words))] if name in ("notes", "compressors") else []
        figures = MEASURES[name](*arguments)
        stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
        found = machine()
        where = f"{found['cpu']}, {found['cores']} cores, torch {found['torch']}, load {os.getloadavg()[0]:.1f}"
        stored[name] = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": where, "figures": figures}
        STORED.write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        yield name


def main(words: Sequence[str]) -> int:
    """Record what is named, then write the pages; the exit code."""
    if words and (words[0] != "record" or not set(words[1:2]) & MEASURES.keys()):
        print(f"usage: python -m bench.figures [record NAME ...], of {', '.join(MEASURES)}", file=sys.stderr)
        return 2
    for name in record(words[1:]):
        print(f"recorded {name}", flush=True)
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := filled(text, stored)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
