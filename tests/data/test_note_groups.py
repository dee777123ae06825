"""Notes that share text are held out together: against naive loops."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import split_roam_paths
from niels_gpt.data.note_groups import group_notes, lines_in_training, split_groups, split_notes

LONG = [f"line {i} is long enough that nobody writes it twice by chance" for i in range(12)]
WORDS = ("alder", "birch", "cedar", "dogwood", "elm", "fir", "gum", "hazel")


def naive_share(held_out, train):
    """Compare every long line of a held-out text with every line of every training text."""
    total = shared = 0
    for text in held_out:
        for line in text.split("\n"):
            if len(line.strip()) >= 40:
                size = len(line.strip().encode())
                total += size
                if any(line.strip() == other.strip() for each in train for other in each.split("\n")):
                    shared += size
    return shared / total if total else 0


texts_of_lines = st.lists(st.lists(st.sampled_from([*LONG, "short", ""]), max_size=4).map("\n".join), max_size=14)


@settings(max_examples=150)
@given(texts=texts_of_lines, more=texts_of_lines)
def test_share_of_lines(texts, more):
    assert lines_in_training(texts, more) == pytest.approx(naive_share(texts, more))


@settings(max_examples=200)
@given(texts=texts_of_lines, seed=st.integers(0, 5), val_frac=st.sampled_from([0, 0.1, 0.3, 0.9]))
def test_groups_are_never_separated(texts, seed, val_frac):
    groups = group_notes(texts, val_frac=val_frac)
    assert sorted(itertools.chain(*groups)) == list(range(len(texts)))
    names = [f"{i}.md" for i in range(len(texts))]
    read = dict(zip(names, texts, strict=True)).__getitem__
    train, held_out = split_notes(names, read, by="shared_text", val_frac=val_frac, seed=seed)
    assert sorted([*train, *held_out]) == sorted(names) and train == [name for name in names if name in train]
    assert all(len({names[i] in held_out for i in group}) == 1 for group in groups)
    wanted = len(split_roam_paths(names, val_frac=val_frac, seed=seed)[1])
    if len(groups) > 1:
        assert bool(held_out) == bool(wanted) and bool(train)
    assert (train, held_out) == split_notes(names, read, by="shared_text", val_frac=val_frac, seed=seed)


@pytest.mark.parametrize("seed", range(5))
def test_notes_without_shared_text_are_split_as_specified(seed):
    names = [f"{i:02}.md" for i in range(30)]
    for by in ("file", "shared_text"):
        split = split_notes(names, lambda name: f"short\nnote {name}: {LONG[0]}", by=by, val_frac=0.2, seed=seed)
        assert split == split_roam_paths(names, val_frac=0.2, seed=seed)


def test_equal_similar_and_line_sharing_notes_form_groups():
    prose = " ".join(f"{a} {b}" for a, b in itertools.permutations(WORDS, 2))
    similar = prose.replace("alder birch", "alder beech")
    texts = [
        f"a\n  {LONG[0]}  \nb", "x", f"{LONG[0]}\n{LONG[1]}", prose, "x ", similar, LONG[1], "y", "z", "w", "v", ""
    ]  # fmt: skip
    groups = group_notes(texts, val_frac=0.1)
    assert [group for group in groups if len(group) > 1] == [[0, 2, 6], [1, 4], [3, 5]]


def test_a_line_of_a_template_does_not_join_the_vault():
    """Held-out notes then share the template with the training notes, which the share counts."""
    texts = [f"{LONG[0]}\n" + "\n".join(f"word{i} number{k}" for k in range(30)) for i in range(60)]
    texts[7] += f"\n{LONG[1]}"
    texts[40] += f"\n{LONG[1]}"
    groups = group_notes(texts, val_frac=0.1)
    assert [group for group in groups if len(group) > 1] == [[7, 40]]
    train, held_out = split_groups(texts, groups, val_frac=0.1, seed=0)
    share = lines_in_training(held_out, train)
    assert share == pytest.approx(naive_share(held_out, train)) and share > 0.5


def test_notes_that_are_all_alike_are_split_one_by_one():
    assert group_notes(["the same"] * 9, val_frac=0.1) == [[i] for i in range(9)]


def test_a_group_that_is_larger_than_what_is_held_out():
    """Ten notes in two groups: one note should be held out; the smaller group is."""
    texts = [LONG[i % 3 == 0] for i in range(10)]
    train, held_out = split_notes(
        [*map(str, range(10))], lambda i: texts[int(i)], by="shared_text", val_frac=0.1, seed=3
    )
    assert held_out == ["0", "3", "6", "9"] and len(train) == 6
