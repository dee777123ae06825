"""Hold out notes whose text does not stand in the others: notes that share text are trained on or held out together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from niels_gpt.data.note_check import near_duplicates, shingle_hashes, word_hashes
from niels_gpt.data.split import number_held_out, shuffled

LONG_LINE = 40
"""Characters of a line that two notes hardly have in common by chance."""
COMMON_LINES = (None, 100, 30, 10, 5, 3, 2, 0)
"""A line that more notes have joins none of them. The first limit is used that leaves enough notes to hold out."""
SplitBy = Literal["file", "shared_text"]


def split_notes(
    paths: Sequence[str], read: Callable[[str], str], *, by: str, val_frac: float, seed: int
) -> tuple[list[str], list[str]]:
    """Return (train, held out), both in input order; `read` returns the text of a note.

    by: a SplitBy. "file" is `split_roam_paths`; "shared_text" never separates notes that share text. Both are the
    same where none do.
    """
    groups = [[i] for i in range(len(paths))]
    if by == "shared_text":
        groups = group_notes(map(read, paths), val_frac=val_frac)
    return split_groups(paths, groups, val_frac=val_frac, seed=seed)


def group_notes(texts: Iterable[str], *, val_frac: float) -> list[list[int]]:
    """Return groups of the numbers of notes that share text, in order of their first notes.

    Notes share text if they are equal or almost so (`near_duplicates`), or have a long line in common. Where this joins
    so many notes that those outside of the largest group are too few to hold out, or have too little text, lines that
    many notes have (of a template) join none: see COMMON_LINES. If nothing helps, each note is a group.
    """
    sizes, shingles = list[int](), list[np.ndarray]()
    notes_with = defaultdict[str, list[int]](list)
    for i, text in enumerate(texts):
        sizes.append(len(text))
        shingles.append(shingle_hashes(word_hashes(text)))
        for line in {*long_lines(text), text.strip()} - {""}:
            notes_with[line].append(i)
    alike = [(a, b) for a, b, _ in near_duplicates(shingles)]
    enough: list[list[int]] | None = None
    for limit in COMMON_LINES:
        pairs = (pair for i in notes_with.values() if limit is None or len(i) <= limit for pair in pairwise(i))
        groups = _connected(len(sizes), [*pairs, *alike])
        outside = [i for group in sorted(groups, key=len)[:-1] for i in group]
        if len(outside) >= number_held_out(len(sizes), val_frac) > 0:
            enough = enough or groups
            if sum(sizes[i] for i in outside) >= val_frac / 2 * sum(sizes):
                return groups
    return enough or [[i] for i in range(len(sizes))]


def split_groups(
    paths: Sequence[str], groups: Sequence[Sequence[int]], *, val_frac: float, seed: int
) -> tuple[list[str], list[str]]:
    """Return (train, held out), both in input order, without separating a group.

    Held out are as many notes as by `split_items`, or a few less; if each group has more notes, the smallest group.
    """
    wanted = number_held_out(len(paths), val_frac)
    order = shuffled(groups, seed)
    held_out = set[int]()
    for group in order:
        if len(held_out) + len(group) <= wanted:
            held_out.update(group)
    if wanted and not held_out and len(groups) > 1:
        smallest = min(order, key=len)
        held_out.update(smallest)
    train = [path for i, path in enumerate(paths) if i not in held_out]
    return train, [path for i, path in enumerate(paths) if i in held_out]


def _connected(number: int, pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the connected components of the graph of `number` nodes with these edges."""
    parent = list(range(number))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for a, b in pairs:
        parent[root(b)] = root(a)
    groups = defaultdict[int, list[int]](list)
    for i in range(number):
        groups[root(i)].append(i)
    return list(groups.values())


def long_lines(text: str) -> Iterator[str]:
    """Yield the lines of at least LONG_LINE characters, without white space around them."""
    return (line for line in map(str.strip, text.split("\n")) if len(line) >= LONG_LINE)


def lines_in_training(held_out: Iterable[str], train: Iterable[str]) -> float:
    """Return the share, by bytes, of the long lines of held-out texts that are lines of the training texts too."""
    known = {line for text in train for line in long_lines(text)}
    total = shared = 0
    for line in (line for text in held_out for line in long_lines(text)):
        size = len(line.encode("utf-8", "surrogatepass"))
        total += size
        shared += size if line in known else 0
    return shared / total if total else 0.0


def shared_lines_text(share: float, by_file: float) -> str:
    """Return a line with what `lines_in_training` is for a split, and what it would be for the split by file."""
    return (
        f"{share:.1%} of the bytes of long held-out lines stand in the notes to train on "
        f"({by_file:.1%} if notes that share text were not kept together)"
    )
