"""`python -m scripts.smoke_loaders [--data PATH] [--offline] [NAME ...]`: print two samples of every loader.

Reads the real datasets from the Hub, or from local files. --data has the format of NIELS_GPT_DATA: a folder with one
sub-folder per dataset id, or a YAML map `id: path`. The last lines are one per loader; exits with 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from niels_gpt.data import embedded
from niels_gpt.data.dolly import iter_dolly_sft
from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.gutenberg import iter_gutenberg
from niels_gpt.data.oasst1 import iter_oasst1_sft
from niels_gpt.data.primer import iter_primer_sft
from niels_gpt.data.reading.hub import go_offline
from niels_gpt.data.reading.local import VARIABLE
from niels_gpt.data.registry import Sample
from niels_gpt.data.roam import iter_roam
from niels_gpt.data.types import ChatSample
from niels_gpt.data.wikitext import iter_wikitext

CHARS = 80
SUBSETS = {"fineweb_edu": "name", "wikitext": "config"}
"""Loaders with several configs -> the name of their option."""


def loaders(subset: dict[str, str]) -> dict[str, Callable[[], Iterator[Sample]]]:
    """Return {name: function that yields at most two samples (oasst1: the threads of two trees)}."""

    def option(source: str) -> dict[str, Any]:
        return {SUBSETS[source]: subset[source]} if source in subset else {}

    return {
        "fineweb_edu": lambda: iter_fineweb_edu(take=2, shuffle_buffer_size=100, **option("fineweb_edu")),
        "wikitext": lambda: iter_wikitext(take=2, **option("wikitext")),
        "gutenberg": lambda: iter_gutenberg(take=2, shuffle_buffer_size=10),
        "dolly15k": lambda: iter_dolly_sft(take=2),
        "oasst1": lambda: iter_oasst1_sft(take_trees=2),
        "roam": lambda: iter_roam(embedded.NOTES, take=2),
        "primer": lambda: iter_primer_sft(embedded.PRIMER, take=2),
    }


def show(sample: Sample) -> None:
    """Print a sample; for a chat, the role and the beginning of each turn."""
    if isinstance(sample, ChatSample):
        for message in sample.messages:
            print(f"  {message.role:>9}: {_line(message.content)}")
        print()
    else:
        print(f"  {_line(sample.text)}  ({len(sample.text):,} characters)")


def check(name: str, open_: Callable[[], Iterator[Sample]]) -> str:
    """Print two samples of a loader; return its summary line. Raises what the loader raises."""
    print(f"\n{name}")
    samples = []
    for sample in open_():
        samples.append(sample)
        if len(samples) <= 2:
            show(sample)
    if not samples:
        raise ValueError("it yielded no samples")
    if any(sample.source != name for sample in samples):
        raise ValueError(f"its samples have the source {samples[0].source}")
    return f"ok      {name}: {len(samples)} {'threads' if name == 'oasst1' else 'samples'}"


def main(arguments: list[str] | None = None) -> int:
    """Run the loaders; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.smoke_loaders", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these loaders")
    parser.add_argument("--data", type=Path, help="local data: a folder, or a YAML map of ids to paths")
    parser.add_argument("--subset", action="append", default=[], metavar="NAME=CONFIG",
                        help="another config of a dataset, e.g. wikitext=wikitext-2-raw-v1")  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="never connect to the Hub")
    options = parser.parse_args(arguments)
    if options.data is not None:
        os.environ[VARIABLE] = str(options.data)
    if options.offline:
        go_offline()
    subset = dict(item.partition("=")[::2] for item in options.subset)
    if not all(name in SUBSETS and config for name, config in subset.items()):
        parser.error(f"--subset takes NAME=CONFIG, where NAME is one of {', '.join(SUBSETS)}")
    known = loaders(subset)
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no loader {', '.join(unknown)}; known loaders are {', '.join(known)}")
    lines = []
    for name in options.names or known:
        try:
            lines.append(check(name, known[name]))
        except Exception as err:  # one loader's failure must not hide the others
            lines.append(f"FAILED  {name}: {type(err).__name__}: {' '.join(str(err).split())}")
    print("\n" + "\n".join(lines))
    return 1 if any(line.startswith("FAILED") for line in lines) else 0


def _line(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= CHARS else flat[:CHARS] + "..."


if __name__ == "__main__":
    sys.exit(main())
