"""`niels-gpt research trace`: which parts of a text are verbatim in the training text of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from niels_gpt.cli.options import CheckpointOption, JsonOption, TokenizerOption, complete_runs, run_or_newest
from niels_gpt.system.program import command

if TYPE_CHECKING:
    from niels_gpt.memorization.provenance import Overlaps
    from niels_gpt.memorization.text_index import Passage


def trace(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] TEXT",
            autocompletion=complete_runs,
            help="The text to trace (- reads it from standard input), after the run; default: the newest.",
        ),
    ],
    checkpoint: CheckpointOption = None,
    min_length: Annotated[
        int, typer.Option("--min-length", min=24, max=1_000_000, help="Characters from which on an overlap counts.")
    ] = 32,
    top: Annotated[int, typer.Option("--top", min=1, help="Overlaps to print, the longest first.")] = 5,
    passages: Annotated[int, typer.Option("--passages", min=1, help="Passages of the training text per overlap.")] = 2,
    tokenizer: TokenizerOption = None,
    json: JsonOption = False,
) -> None:
    """Show which parts of a text are verbatim in the training text, and in which documents.

    The first call for a run builds an index of its training text in the cache folder. Held-out text is compared, so
    that usual phrases do not count as recited.
    """
    text, run = split_words(words)

    from json import dumps

    from niels_gpt.cli.generate_text import read_stdin
    from niels_gpt.memorization.provenance import find_overlaps, open_provenance
    from niels_gpt.runs.loading import load_run
    from niels_gpt.system.progress import progress_bar

    text = read_stdin() if text == "-" else text
    if not text:
        raise ValueError("the text is empty: give at least one character to trace")
    loaded = load_run(run_or_newest(run, checkpoint), checkpoint, "cpu", tokenizer)
    provenance = open_provenance(loaded, lambda title: progress_bar(title))
    overlaps = find_overlaps(provenance, text, min_length=min_length, passages=passages)
    if json:
        print(dumps({"checkpoint": str(loaded.path), **overlaps.as_json()}, ensure_ascii=False))
    else:
        _show(overlaps, top)


def split_words(words: list[str]) -> tuple[str, Path | None]:
    """Return (text, run or None) of `[RUN] TEXT`, in either order. Raises ValueError if neither of two names a run."""
    from niels_gpt.runs.loading import names_run

    first, *rest = words
    if not rest:
        return first, None
    if len(rest) == 1 and names_run(rest[0]):
        return first, Path(rest[0])
    if len(rest) == 1 and names_run(first):
        return rest[0], Path(first)
    if len(rest) == 1:
        raise ValueError(
            f"{rest[0]!r} is not a run, a pipeline or a checkpoint. Name a run folder (it has a config.yaml); or quote "
            f"a text of several words: {command('research', 'trace', ' '.join(words))}"
        )
    raise ValueError(f"quote a text of several words: {command('research', 'trace', ' '.join(words))}")


def _show(overlaps: Overlaps, top: int) -> None:
    """Print the verdict, what is usual, and the longest overlaps with their passages."""
    import sys

    from niels_gpt.system.console import plural

    for problem in overlaps.problems:
        print(f"not all training text is searched as it was: {problem}", file=sys.stderr)
    print(overlaps.verdict())
    for usual in overlaps.usual:
        copies = f", without {usual.copies:,} that copy training text" if usual.copies else ""
        print(
            f"held-out text of {usual.source} ({plural(usual.passages, 'passage')} of this length{copies}): "
            f"{usual.share:.0%} covered, longest {usual.longest:,}; 95 % have at most {usual.high_share:.0%} "
            f"and {usual.high_longest:,}"
        )
    for span in overlaps.spans[:top]:
        length = span.end - span.start
        more = f", {span.occurrences:,} times" if span.occurrences > 1 else ""
        print(f"\n{length:,} characters, {span.start:,} to {span.end:,}{more}")
        for passage in span.passages:
            print(f"  {passage.source}: {passage.file or passage.document}, byte {passage.offset:,}")
            print(f"    {_marked(passage)}")
    if len(overlaps.spans) > top:
        print(f"\n{plural(len(overlaps.spans) - top, 'shorter overlap')}: --top {len(overlaps.spans)} shows all")


def _marked(passage: Passage) -> str:
    """The passage between brackets, with what surrounds it, in one line."""
    before, inside, after = (repr(text)[1:-1] for text in (passage.before, passage.text, passage.after))
    if len(inside) > 400:
        inside = f"{inside[:200]} … {inside[-200:]}"
    return f"{before}[[{inside}]]{after}"
