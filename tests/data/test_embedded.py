"""The embedded notes, dialogues and docstrings."""

import json
import re
import sys
import sysconfig

import pytest

from niels_gpt.chat import extract_assistant_reply, format_chat
from niels_gpt.data import embedded

NOTES = sorted(embedded.NOTES.rglob("*"))
DIALOGUES = embedded.PRIMER.read_bytes().decode("utf-8").split("\n\n<dialogue>\n\n")
TURN = re.compile(r"(system|user|assistant): (\S.*\S|\S)")
FIRST_PERSON = re.compile(r"\b(i|i'm|i've|i'd|i'll|me|my|mine|myself|we|us|our|ours|ourselves)\b", re.IGNORECASE)


def test_notes_are_plain_markdown_with_different_titles():
    assert len(NOTES) >= 40
    assert len({path.read_text(encoding="utf-8").splitlines()[0] for path in NOTES}) == len(NOTES)
    for path in NOTES:
        assert path.suffix == ".md"
        text = path.read_bytes().decode("utf-8")
        assert text.startswith("# ") and text.endswith("\n"), path
        assert not set("\r\t\ufeff") & set(text), path
        assert sum(character.isascii() for character in text) >= 0.99 * len(text), path
        assert len(text) >= 200, path


def turns(dialogue):
    matches = [TURN.fullmatch(line) for line in dialogue.removesuffix("\n").split("\n")]
    assert all(matches), dialogue
    return [(match[1], match[2]) for match in matches]


def test_dialogues_are_different_and_exact_transcripts():
    assert len(set(DIALOGUES)) == len(DIALOGUES) >= 200  # a copy of a held-out dialogue would be trained on
    assert not any(dialogue.endswith("\n") for dialogue in DIALOGUES[:-1])
    for dialogue in DIALOGUES:
        roles = " ".join(role for role, _ in turns(dialogue))
        assert re.fullmatch(r"(system )?user assistant( user assistant)*", roles), dialogue
        assert "<dialogue>" not in dialogue


def test_dialogues_match_format_and_extraction():
    for dialogue in DIALOGUES:
        *before, (role, reply) = turns(dialogue)
        assert role == "assistant"
        prompt = format_chat([{"role": role, "content": content} for role, content in before])
        assert prompt + reply == dialogue.removesuffix("\n")
        assert extract_assistant_reply(dialogue) == reply


def test_the_assistant_never_speaks_in_the_first_person():
    spoken = [content for dialogue in DIALOGUES for role, content in turns(dialogue) if role == "assistant"]
    assert [content for content in spoken if FIRST_PERSON.search(content)] == []
    assert sum("niels" in content for content in spoken) >= 100


def normalized(text):
    return " ".join(re.findall(r"[^\W_]+", text.lower()))


def test_the_questions_are_new_and_cover_every_topic():
    rows = [json.loads(line) for line in embedded.QUESTIONS.read_bytes().decode("utf-8").splitlines()]
    assert all(set(row) == {"topic", "question", "words"} for row in rows)
    assert len({normalized(row["question"]) for row in rows}) == len(rows) >= 100
    spoken = [turn for dialogue in DIALOGUES for turn in turns(dialogue)]
    trained = {normalized(content) for role, content in spoken if role == "user"}
    assert [row["question"] for row in rows if normalized(row["question"]) in trained] == []
    # A topic is an answer of the primer. Each is asked about, and each question has an answer.
    answers = {content for role, content in spoken if role == "assistant"}
    topics = {row["topic"]: tuple(row["words"]) for row in rows}
    assert len(topics) == len(answers) >= 100
    answered = {
        topic: {answer for answer in answers if any(re.search(rf"\b{re.escape(word)}", answer, re.I) for word in words)}
        for topic, words in topics.items()
    }
    assert [topic for topic, found in answered.items() if not found] == []
    assert answers - set().union(*answered.values()) == set()
    # The words tell the topics apart: few other answers have them.
    assert sum(len(found) for found in answered.values()) < 5 * len(topics)


def test_the_fingerprint():
    paths = embedded.stdlib_files()
    assert paths == sorted(paths)
    assert len(paths) >= 150
    folders = {part for path in paths for part in path.relative_to(sysconfig.get_paths()["stdlib"]).parts[:-1]}
    assert "json" in folders and not folders & {"test", "tests", "site-packages", "idlelib"}
    assert embedded.stdlib_fingerprint() == {
        "python": ".".join(map(str, sys.version_info[:3])),
        "files": len(paths),
        "size": sum(len(path.read_bytes()) for path in paths),
    }


def test_an_installation_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    for number in range(49):
        (tmp_path / f"{number}.py").touch()
    with pytest.raises(ValueError, match="standard library") as caught:
        embedded.stdlib_files()
    assert str(tmp_path) in str(caught.value)
    (tmp_path / "49.py").touch()
    assert len(embedded.stdlib_files()) == 50


def test_docstrings_golden(tmp_path, monkeypatch):
    """A small standard library: which docstrings, in which order and with which names; invalid Python is skipped."""
    side_effect = tmp_path / "imported"
    long = "A docstring that is long enough to count as text."
    limit = "x" * 40
    (tmp_path / "package" / "test").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text(f'"""{long}"""\n', encoding="utf-8")
    (tmp_path / "package" / "test" / "skipped.py").write_text(f'"""{long}"""\n', encoding="utf-8")
    (tmp_path / "package" / "module.py").write_text(
        f"import pathlib\npathlib.Path({str(side_effect)!r}).touch()\n"
        f"class Outer:\n    '''Outer: {long}\n\n    text\n        indented\n    '''\n"
        f"    def short(self):\n        '''{limit[1:]}'''\n"
        f"    def just_long_enough(self):\n        '''{limit}'''\n"
        f"    async def method(self):\n        '''Method: {long}'''\n"
        f"        def inner():\n            '''Inner: {long}'''\n"
        f"def function():\n    '''Function: {long}'''\n",
        encoding="utf-8",
    )
    (tmp_path / "no_python.py").write_text("this is not python\n", encoding="utf-8")
    (tmp_path / "silent.py").write_text("x = 1\n", encoding="utf-8")
    for number in range(60):
        (tmp_path / f"z{number:02}.py").write_text("", encoding="utf-8")
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert list(embedded.iter_stdlib()) == [
        ("package", f"package\n{long}\n"),
        (
            "package.module",
            f"package.module.Outer\nOuter: {long}\n\ntext\n    indented\n\n"
            f"package.module.Outer.just_long_enough\n{limit}\n\n"
            f"package.module.Outer.method\nMethod: {long}\n\n"
            f"package.module.Outer.method.inner\nInner: {long}\n\n"
            f"package.module.function\nFunction: {long}\n",
        ),
    ]
    assert not side_effect.exists()
