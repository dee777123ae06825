import importlib
import inspect
import re
import sys

import pytest

from niels_gpt.chat import extract_assistant_reply, format_chat
from niels_gpt.data import embedded

NOTES = sorted(embedded.NOTES.rglob("*"))
DIALOGUES = embedded.PRIMER.read_bytes().decode("utf-8").split("\n\n<dialogue>\n\n")
TURN = re.compile(r"(system|user|assistant): (\S.*\S|\S)")
FIRST_PERSON = re.compile(r"\b(i|i'm|i've|i'd|i'll|me|my|mine|myself|we|us|our|ours|ourselves)\b", re.IGNORECASE)


# --- notes -------------------------------------------------------------------------------------------


def test_there_are_enough_notes():
    assert len(NOTES) >= 40
    assert all(path.is_file() and path.suffix == ".md" for path in NOTES)


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_a_note_is_plain_markdown(path):
    text = path.read_bytes().decode("utf-8")
    assert text.startswith("# ")
    assert text.endswith("\n")
    assert "\r" not in text
    assert "\t" not in text
    assert "\ufeff" not in text
    assert sum(character.isascii() for character in text) >= 0.99 * len(text)
    assert len(text) >= 200


def test_notes_have_titles_of_their_own():
    titles = [path.read_text(encoding="utf-8").splitlines()[0] for path in NOTES]
    assert len(set(titles)) == len(titles)


# --- primer ------------------------------------------------------------------------------------------


def turns(dialogue):
    matches = [TURN.fullmatch(line) for line in dialogue.removesuffix("\n").split("\n")]
    assert all(matches), dialogue
    return [(match[1], match[2]) for match in matches]


def test_there_are_enough_dialogues():
    assert len(DIALOGUES) >= 200


def test_no_dialogue_is_there_twice():
    """A copy in the held-out part would be no held-out dialogue."""
    assert len(set(DIALOGUES)) == len(DIALOGUES)


def test_dialogues_are_exact_transcripts():
    for dialogue in DIALOGUES:
        roles = " ".join(role for role, _ in turns(dialogue))
        assert re.fullmatch(r"(system )?user assistant( user assistant)*", roles), dialogue
        assert "<dialogue>" not in dialogue


def test_dialogues_are_what_chat_formats_and_extracts():
    for dialogue in DIALOGUES:
        *before, (role, reply) = turns(dialogue)
        assert role == "assistant"
        prompt = format_chat([{"role": role, "content": content} for role, content in before])
        assert prompt + reply == dialogue.removesuffix("\n")
        assert extract_assistant_reply(dialogue) == reply


def test_only_the_file_ends_with_a_newline():
    assert [number for number, dialogue in enumerate(DIALOGUES) if dialogue.endswith("\n")] in (
        [],
        [len(DIALOGUES) - 1],
    )


def test_the_assistant_never_speaks_in_the_first_person():
    spoken = [content for dialogue in DIALOGUES for role, content in turns(dialogue) if role == "assistant"]
    assert [content for content in spoken if FIRST_PERSON.search(content)] == []
    assert sum("niels" in content for content in spoken) >= 100


# --- docstrings --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def documents():
    before = set(sys.modules)
    made = embedded.stdlib_documents()
    assert set(sys.modules) == before, "reading docstrings imported modules"
    return made


def test_many_documents_with_names_of_their_own(documents):
    names = [name for name, _ in documents]
    assert len(documents) >= 150
    assert len(set(names)) == len(names)
    assert sum(len(text) for _, text in documents) > 500_000
    assert {"json", "json.decoder", "argparse", "asyncio.tasks", "statistics"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages", "idlelib"} & set(name.split("."))]
    assert all(text.endswith("\n") and text.strip() for _, text in documents)
    "".join(text for _, text in documents).encode("utf-8")


def test_the_fingerprint_is_what_the_documents_depend_on(documents):
    paths = embedded.stdlib_files()
    assert paths == sorted(paths)
    assert len(paths) >= len(documents)
    assert embedded.stdlib_fingerprint() == {
        "python": ".".join(map(str, sys.version_info[:3])),
        "files": len(paths),
        "size": sum(len(path.read_bytes()) for path in paths),
    }


@pytest.mark.parametrize("name", ["json", "textwrap", "fnmatch", "statistics", "shlex"])
def test_documents_hold_what_the_running_modules_say(documents, name):
    text, module, places = dict(documents)[name], importlib.import_module(name), []
    things = {name: module}
    for called, thing in vars(module).items():
        if inspect.isfunction(thing) and (thing.__module__, thing.__qualname__) == (name, called):
            things[f"{name}.{called}"] = thing
    for title, thing in things.items():
        said = inspect.cleandoc(thing.__doc__ or "")
        if len(said) >= 40:
            places.append(text.find(f"{title}\n{said}\n"))
    assert len(places) >= 2
    assert places == sorted(places)  # in the order of the file
    assert places[0] >= 0


def test_an_installation_without_sources_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="standard library") as caught:
        embedded.stdlib_files()
    assert str(tmp_path) in str(caught.value)


def test_docstrings_golden(tmp_path, monkeypatch):
    """A small standard library: what counts, in which order, under which name; what is no Python is passed over."""
    side_effect = tmp_path / "imported"
    long = "A docstring that is long enough to count as text."
    (tmp_path / "package" / "test").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text(f'"""{long}"""\n', encoding="utf-8")
    (tmp_path / "package" / "test" / "left_out.py").write_text(f'"""{long}"""\n', encoding="utf-8")
    (tmp_path / "package" / "module.py").write_text(
        f"import pathlib\npathlib.Path({str(side_effect)!r}).touch()\n"
        f"class Outer:\n    '''Outer: {long}\n\n    text\n        indented\n    '''\n"
        f"    def short(self):\n        '''Too short.'''\n"
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
    assert embedded.stdlib_documents() == [
        ("package", f"package\n{long}\n"),
        (
            "package.module",
            f"package.module.Outer\nOuter: {long}\n\ntext\n    indented\n\n"
            f"package.module.Outer.method\nMethod: {long}\n\n"
            f"package.module.Outer.method.inner\nInner: {long}\n\n"
            f"package.module.function\nFunction: {long}\n",
        ),
    ]
    assert not side_effect.exists()
