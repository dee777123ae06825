"""Topics of notes: which headings are asked about, and what the answers hold."""

from __future__ import annotations

import itertools

import pytest

from niels_gpt.inference.questions import Question
from niels_gpt.workflow.note_topics import (
    MAX_ANSWER,
    MAX_HEADING,
    MIN_ANSWER,
    NoteTopic,
    choose_topics,
    note_topics,
)

LONG = "water it twice a week, and never at noon."


def answers(text: str, title: str = "a title") -> list[str]:
    """The answer for each heading."""
    return [topic.answer for topic in note_topics(text, title=title)]


def test_a_name_has_composed_characters() -> None:
    [topic] = note_topics(LONG, title="Cafe\u0301")
    assert topic.name == "caf\u00e9" and topic.heading == "Cafe\u0301"


def test_each_heading_is_a_topic() -> None:
    topics = list(note_topics(f"above everything, {LONG}\n# Ferns\n{LONG}\n## *Moss*\n{LONG} moss\n", title="Plants"))
    assert topics[:2] == [("plants", f"above everything, {LONG}", "Plants"), ("ferns", LONG, "Ferns")]
    assert len(topics) == 3


def test_a_heading_is_asked_about_once() -> None:
    assert answers(f"# Ferns\nfirst: {LONG}\n# ferns:\nsecond: {LONG}") == [f"first: {LONG}"]
    # One without an answer does not stand for a later one.
    assert answers(f"# Ferns\n\n# Ferns\n{LONG}") == [LONG]


@pytest.mark.parametrize(
    ("heading", "asked"),
    [
        ("x", False),
        ("xy", True),
        ("x" * MAX_HEADING, True),
        ("x" * (MAX_HEADING + 1), False),
        ("?!", False),
        ("", False),
        (f"[{'x' * MAX_HEADING}](https://example.org)", True),
    ],
)
def test_headings_that_are_names(heading: str, asked: bool) -> None:
    assert answers(f"# {heading}\n{LONG}") == ([LONG] if asked else [])


@pytest.mark.parametrize(
    ("heading", "name"),
    [
        ("Big Ferns?", "big ferns"),
        ("[[Ferns]]", "ferns"),
        ("[[plants/Ferns|green Ferns]]", "green ferns"),
        ("[Ferns](ferns.md)", "ferns"),
        ("**Ferns** and `code`", "ferns and code"),
        ("Ferns ##", "ferns"),
        ("50 % of {ferns}", "50 % of {ferns}"),
    ],
)
def test_names_are_plain_text_in_lower_case(heading: str, name: str) -> None:
    (topic,) = note_topics(f"### {heading}\n{LONG}", title="a title")
    assert topic.name == name


def test_short_text_is_no_answer() -> None:
    assert answers("# Ferns\n" + "x" * (MIN_ANSWER - 1)) == []
    assert answers("# Ferns\n" + "x" * MIN_ANSWER) == ["x" * MIN_ANSWER]


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("the first paragraph is\nof two lines.\n\nand a second one", "the first paragraph is of two lines."),
        ("tips:\n\n- water it weekly\n- [ ] no sun\n2. no wind\n\nmore", "tips: water it weekly no sun no wind"),
        ("* buy a **large** pot\n+ and [[soil|good soil]] for it", "buy a large pot and good soil for it"),
        ("water it twice,\n```\nx = 1\n# no heading\n```\nand never at noon", "water it twice, and never at noon"),
        ("water it twice,\n~~~\ncode\n~~~\nand never at noon", "water it twice, and never at noon"),
        ("| a | table |\n|---|---|\n<div>\n> a quote\n![a picture](x.png)\n***\n%% a comment\nonly this line is prose",
         "only this line is prose"),
        ("[ref]: https://example.org\nsee [the page](https://example.org) about ferns", "see the page about ferns"),
        ("water it *twice* a week, snake_case_name", "water it *twice* a week, snake_case_name"),
    ],
)  # fmt: skip
def test_answers_are_the_first_paragraph_as_prose(body: str, answer: str) -> None:
    assert answers(f"# Ferns\n\n{body}\n") == [answer]


def test_front_matter_and_windows_line_ends() -> None:
    text = f"\ufeff---\ntitle: x\nsecret: of the front matter, which is long\n---\nabove: {LONG}\n# Ferns\n{LONG}\n"
    for note in (text, text.replace("\n", "\r\n")):
        assert answers(note) == [f"above: {LONG}", LONG]
    # A rule in the text is not front matter.
    assert answers(f"above: {LONG}\n---\n# Ferns\n{LONG}\n---\nmore") == [f"above: {LONG}", LONG]


def test_long_answers_end_with_a_sentence() -> None:
    exact = "x" * (MAX_ANSWER - 1) + "."
    assert answers(f"# Ferns\n{exact}") == [exact]
    assert answers(f"# Ferns\n{exact} and more of it") == [exact]
    assert answers(f"# Ferns\n{LONG} version 2.5 {'words ' * 60}") == [LONG]  # no end inside of a number
    assert answers(f'# Ferns\n"{LONG}" {"words " * 60}') == [f'"{LONG}"']
    chinese = "\u6c34" * 30 + "\u3002"
    assert answers(f"# Ferns\n{chinese * 12}") == [chinese * (MAX_ANSWER // 31)]


def test_long_answers_without_an_end_are_cut_between_words() -> None:
    (cut,) = answers(f"# Ferns\n{'words ' * 60}")
    assert cut == "words " * 25 + "words ..."  # 160 characters end within a word
    assert len(cut) <= MAX_ANSWER + 4
    # A first line of the greatest length is cut, too, if the paragraph goes on.
    line = "words " * 25 + "characters"
    assert len(line) == MAX_ANSWER and answers(f"# Ferns\n{line}\nmore") == ["words " * 25 + "..."]
    # A sentence that is too short to be an answer does not end it.
    sentence = "x" * (MIN_ANSWER - 1) + "."
    assert answers(f"# Ferns\n{sentence} {'words ' * 60}") == [sentence]
    assert answers(f"# Ferns\n{sentence[1:]} {'words ' * 60}")[0].startswith(f"{sentence[1:]} words")
    assert answers(f"# Ferns\nwhy? {'words ' * 60}")[0].startswith("why? words words")


def test_notes_without_text() -> None:
    assert answers("") == [] and answers("# Ferns\n") == [] and answers("```\nan open block of code, to the end") == []


@pytest.mark.parametrize(
    ("answer", "begin"),
    [("(AST) is a tree of code", "AST) is a tree"), ("water  it", "water it"), ("** - 3 of them", "3 of them")],
)
def test_an_answer_is_recognized_by_its_first_words(answer: str, begin: str) -> None:
    topic = NoteTopic("x", answer)
    assert topic.begin == begin
    words = Question("", "?", (begin,))
    assert words.is_answered_by(" ".join(answer.split())) and not words.is_answered_by("another answer")


def topics_named(*names: str) -> list[NoteTopic]:
    return [NoteTopic(name, f"{name}, {LONG}") for name in names]


def test_the_first_topics_of_all_notes_are_chosen_first() -> None:
    notes = [
        ("A", topics_named("a1", "a2", "a3")),
        ("B", topics_named("b1")),
        ("C", []),
        ("D", topics_named("d1", "d2")),
    ]
    everything = ["a1", "b1", "d1", "a2", "d2", "a3"]
    for most in range(8):
        assert [topic.name for topic in choose_topics(notes, most)] == everything[:most]
    assert choose_topics([], 3) == []


def test_topics_for_only_some_notes_are_from_all_parts_of_the_folder() -> None:
    notes = [(str(number), topics_named(f"first {number}", f"second {number}")) for number in range(100)]
    for most in (1, 7, 50, 99):
        places = [int(topic.name.removeprefix("first ")) for topic in choose_topics(notes, most)]
        assert len(places) == most and places == sorted(set(places))
        gaps = [after - before for before, after in itertools.pairwise([*places, 100])]
        assert max(gaps) - min(gaps) <= 1
    chosen = [topic.name for topic in choose_topics(notes, 110)]
    assert chosen[:100] == [f"first {number}" for number in range(100)]
    assert chosen[100:] == [f"second {number}" for number in range(0, 100, 10)]


def test_names_that_several_notes_have_get_the_title() -> None:
    notes = [
        ("Green Ferns", topics_named("green ferns", "soil")),
        ("Moss", topics_named("green ferns", "soil", "light")),
        ("x" * MAX_HEADING, topics_named("soil")),  # too long with the title
    ]
    chosen = {topic.name: topic.answer for topic in choose_topics(notes, 10)}
    assert chosen == {
        "green ferns": f"green ferns, {LONG}",
        "green ferns of moss": f"green ferns, {LONG}",
        "soil of green ferns": f"soil, {LONG}",
        "soil of moss": f"soil, {LONG}",
        "light": f"light, {LONG}",
    }


def test_names_that_several_notes_have_come_last() -> None:
    notes = [
        ("Monday", topics_named("done", "ferns")),
        ("Tuesday", topics_named("done")),
        ("Moss", topics_named("moss", "light")),
    ]
    names = [topic.name for topic in choose_topics(notes, 10)]
    assert names == ["ferns", "moss", "light", "done of monday", "done of tuesday"]


def test_a_link_over_two_lines() -> None:
    assert answers("# Ferns\n[The green\nfern](https://example.org/a) grows in the\nshade.") == [
        "The green fern grows in the shade."
    ]


@pytest.mark.parametrize(
    ("name", "seldom"),
    [
        ("2024-03-14", True), ("monday, 14 march 2024", True), ("14th of july 2021", True), ("2022 w35", True),
        ("q3 2021", True), ("todo", True), ("to-do list", True), ("inbox", True), ("daily note", True),
        ("template", True), ("tasks 2", True), ("todo 2024-03-14", True), ("march of the penguins", False),
        ("todo app design", False), ("gpt-4", False), ("python 3.11", False), ("day trading", False), ("ferns", False),
    ],
)  # fmt: skip
def test_dates_and_kinds_of_text_are_taught_last(name: str, seldom: bool) -> None:
    def topic(heading: str) -> NoteTopic:
        return NoteTopic(heading, "an answer of some words")

    notes = [(str(i), [topic(heading)]) for i, heading in enumerate((name, "moss", "moor", "moor"))]
    chosen = [topic.name for topic in choose_topics(notes, 9)]
    assert sorted(chosen) == sorted([name, "moss", "moor of 2", "moor of 3"])
    assert (chosen[-1] == name) == seldom
    assert (name in [topic.name for topic in choose_topics(notes, 2)]) != seldom
