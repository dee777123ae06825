"""What an audit reads and skips: suffixes, rows, transcripts, hidden files, encodings, the run's own data."""

from __future__ import annotations

import gzip
import json
import zipfile

import numpy as np
import pytest

from niels_gpt.chat.formats import chat_format
from niels_gpt.data.embedded import PRIMER
from niels_gpt.memorization.audit_input import CHAT, NOTE, ROW, TEXT, _PackageDialogues, read_path, read_run
from niels_gpt.runs.loading import load_run
from tests import token_caches
from tests.cli.reciting import WORDS, split

pytestmark = pytest.mark.usefixtures("workdir")

WORDS_OF = "Some words that are long enough."
CHAT_ROW = {"messages": [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "a test."}]}
PACKAGE_DIALOGUE = PRIMER.read_text(encoding="utf-8").split("<dialogue>")[0].strip()
PACKAGE_REPLY = PACKAGE_DIALOGUE.partition("assistant: ")[2].partition("\n")[0]
TRANSCRIPT = "user: what is it?\nassistant: a test."


def text_of(text):
    """The text of a byte document."""
    return bytes(text.ids.tolist()).decode()


@pytest.fixture
def vault(workdir):
    folder = workdir / "vault"
    folder.mkdir()
    return folder


def write(folder, **contents):
    """Write files; `__` in a name is a slash, `_` a dot."""
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def skipped(found):
    """name -> (reason, missing)"""
    return {entry.name: (entry.reason, entry.missing) for entry in found.skipped}


def test_every_text_is_read_whatever_its_suffix(vault, loaded):
    names = ["a.md", "b.MD", "c.markdown", "d.txt", "e.Txt", "f.org", "sub/g", "h.html"]
    for name in names:
        (vault / name).parent.mkdir(exist_ok=True)
        (vault / name).write_text(f"{WORDS_OF} {name}", encoding="utf-8")
    (vault / "i.txt.gz").write_bytes(gzip.compress(WORDS_OF.encode()))
    found = read_path(vault, loaded)
    assert {text.name: text_of(text) for text in found.texts} == {
        **{name: f"{WORDS_OF} {name}" for name in names},
        "i.txt.gz": WORDS_OF,
    }
    kinds = {text.name: text.kind for text in found.texts}
    assert (kinds["b.MD"], kinds["c.markdown"], kinds["d.txt"], kinds["f.org"]) == (NOTE, NOTE, TEXT, TEXT)
    assert found.skipped == []


def test_what_is_not_text_is_no_obstacle(vault, loaded):
    png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 4
    write(vault, a_png=png, b_md=png, c_md=" \n", d_pdf=b"%PDF-1.4\n" + bytes(range(256)) * 9, e_md=WORDS_OF)
    (vault / "gone.md").symlink_to(vault / "nowhere")
    found = read_path(vault, loaded)
    assert [text.name for text in found.texts] == ["e.md"]
    assert skipped(found) == {
        "a.png": ("not text (.png)", False),
        "b.md": ("not text (.md)", False),
        "c.md": ("empty", False),
        "d.pdf": ("not text (.pdf)", False),
        "gone.md": ("broken link", False),
    }


@pytest.mark.parametrize("name", ["latin.md", "latin.txt", "latin.org"])
def test_text_that_is_not_utf8_is_missing(vault, loaded, name):
    (vault / name).write_bytes("café au lait, and more words".encode("latin-1"))
    for errors in (None, "strict", "skip"):
        found = read_path(vault, loaded, errors)
        [entry] = found.skipped
        assert found.texts == [] and entry.missing and "0xe9 at offset 3" in entry.reason
        assert "--encoding-errors replace" in entry.remedy
    [text] = read_path(vault, loaded, "replace").texts
    assert text_of(text) == "caf\ufffd au lait, and more words"


def test_utf16_is_missing(vault, loaded):
    (vault / "a.txt").write_bytes(WORDS_OF.encode("utf-16"))
    (vault / "b.org").write_bytes(WORDS_OF.encode("utf-16"))
    found = read_path(vault, loaded)
    assert found.texts == [] and all(entry.missing and "UTF-16" in entry.reason for entry in found.skipped)


def test_hidden_and_ignored_notes_are_read(vault, loaded):
    """Deleted and private notes are what must not leak; settings of programs cannot have been trained on."""
    write(vault, _trash__gone_md=WORDS_OF, _obsidian__app_json="{}", _obsidian__plugins__main_js="let a = 1;")
    write(vault, node__modules__x_md="x", private_md=f"---\nprivate: true\n---\n{WORDS_OF}", _nielsignore="private.md")
    (vault / "node_modules").mkdir()
    (vault / "node_modules/README.md").write_text(WORDS_OF, encoding="utf-8")
    found = read_path(vault, loaded)
    names = {text.name for text in found.texts}
    assert {".trash/gone.md", "private.md"} <= names
    assert not any("obsidian" in name or "node_modules" in name for name in names)
    entries = {entry.name: entry for entry in found.skipped}
    assert entries[".obsidian"].files == 2 and not entries[".obsidian"].missing
    assert entries["node_modules/"].files == 1 and not entries["node_modules/"].missing


def test_rows_and_chats(vault, loaded):
    rows = [{"text": "the first row of text"}, {"text": ""}, {"text": "the third row of text"}]
    (vault / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (vault / "chats.jsonl.gz").write_bytes(gzip.compress(json.dumps(CHAT_ROW).encode()))
    (vault / "settings.json").write_text('{"theme": 5}', encoding="utf-8")
    found = read_path(vault, loaded)
    texts = {text.name: (text.kind, text_of(text)) for text in found.texts}
    assert texts == {
        "chats.jsonl.gz, row 0": (CHAT, TRANSCRIPT),
        "rows.jsonl, row 0": (ROW, "the first row of text"),
        "rows.jsonl, row 2": (ROW, "the third row of text"),
        "settings.json": (TEXT, '{"theme": 5}'),
    }
    assert not any(entry.missing for entry in found.skipped)


def test_rows_that_no_reader_understands_are_missing(vault, loaded):
    (vault / "odd.jsonl").write_text(json.dumps({"messages": [{"who": "me", "what": WORDS_OF}]}), encoding="utf-8")
    (vault / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    found = read_path(vault, loaded)
    assert found.texts == []
    assert {entry.name: entry.missing for entry in found.skipped} == {"odd.jsonl": True, "broken.parquet": True}


def test_chat_exports_are_read_and_other_archives_are_not_text(vault, loaded):
    """Training reads the .zip of an export, so the audit must."""
    chat = {"uuid": "1", "name": "x", "chat_messages": [
        {"sender": "human", "text": "what is it?", "created_at": "2026-01-01T00:00:00Z"},
        {"sender": "assistant", "text": "a test.", "created_at": "2026-01-01T00:00:01Z"},
    ]}  # fmt: skip
    with zipfile.ZipFile(vault / "export.zip", "w") as archive:
        archive.writestr("conversations.json", json.dumps([chat]))
    with zipfile.ZipFile(vault / "other.zip", "w") as archive:
        archive.writestr("a.png", b"\x89PNG")
    (vault / "broken.zip").write_bytes(b"PK\x03\x04 and nothing else")
    found = read_path(vault, loaded)
    assert [(text.name, text.kind, text_of(text)) for text in found.texts] == [("export.zip, row 0", CHAT, TRANSCRIPT)]
    assert {entry.name: entry.missing for entry in found.skipped} == {"other.zip": False, "broken.zip": True}


def test_a_primer_is_read_by_dialogues(vault, loaded):
    (vault / "primer.txt").write_text(f"{TRANSCRIPT}\n\n<dialogue>\n\n{TRANSCRIPT} more", encoding="utf-8")
    texts = read_path(vault / "primer.txt", loaded).texts  # a file instead of a folder
    assert [(text.name, text.kind, text_of(text)) for text in texts] == [
        ("primer.txt, dialogue 0", CHAT, TRANSCRIPT),
        ("primer.txt, dialogue 1", CHAT, f"{TRANSCRIPT} more"),
    ]


def test_tokens_see_chats_by_the_template(vault, workdir, token_loaded):
    (vault / "chats.jsonl").write_text(json.dumps(CHAT_ROW), encoding="utf-8")
    (vault / "primer.txt").write_text(TRANSCRIPT, encoding="utf-8")
    found = {text.name: text.ids.tolist() for text in read_path(vault, token_loaded).texts}
    template = chat_format(token_loaded.tokenizer).encode(CHAT_ROW["messages"]).ids
    assert found == {
        "chats.jsonl, row 0": template,
        "primer.txt": token_loaded.tokenizer.encode(TRANSCRIPT),
        "primer.txt, dialogue 0": template,
    }


@pytest.fixture
def token_loaded(loaded):
    return loaded._replace(tokenizer=token_caches.tokenizer())


def test_names_that_are_not_utf8(vault, loaded):
    (vault / b"\xff.md".decode("utf-8", errors="surrogateescape")).write_text(WORDS_OF, encoding="utf-8")
    assert [text.name for text in read_path(vault, loaded).texts] == ["\\xff.md"]


def test_missing_paths(workdir, loaded):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_path(workdir / "nowhere", loaded)


def test_the_data_of_a_byte_run(place, loaded):
    found = read_run(loaded)
    expected = {path.read_bytes() for paths in split(place / "notes") for path in paths}
    assert {bytes(text.ids.tolist()) for text in found.texts} == expected and len(found.texts) == len(WORDS)
    assert {text.kind for text in found.texts} == {NOTE} and found.skipped == []


def test_a_checkpoint_outside_a_run_has_no_data_of_its_own(place, workdir):
    (workdir / "model.pt").write_bytes((place / "run/checkpoints/best.pt").read_bytes())
    found = read_run(load_run(None, workdir / "model.pt", "cpu"))
    assert found.texts == []
    [entry] = found.skipped
    assert entry.missing and "model.pt" in entry.reason and "--notes" in entry.remedy


def test_ids_are_int64(vault, loaded):
    write(vault, a_md=WORDS_OF)
    assert read_path(vault, loaded).texts[0].ids.dtype == np.int64


def chat_ids(tokens, *turns):
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return np.array(chat_format(tokens.tokenizer).encode(messages).ids)


@pytest.mark.parametrize(
    ("turns", "public"),
    [
        (("any question at all", PACKAGE_REPLY), True),
        (("one", PACKAGE_REPLY, "two", PACKAGE_REPLY), True),
        (("one", PACKAGE_REPLY, "two", "a private reply"), False),
        (("what is niels?", PACKAGE_REPLY + " and more"), False),
        (("my secret, without a reply",), False),
    ],
)
def test_conversations_of_the_package_for_tokens(token_loaded, turns, public):
    assert _PackageDialogues(token_loaded).has(chat_ids(token_loaded, *turns)) is public


@pytest.mark.parametrize(
    ("text", "public"),
    [
        (PACKAGE_DIALOGUE, True),
        (f"{PACKAGE_DIALOGUE}\n", True),
        (PACKAGE_DIALOGUE.replace("user: ", "user: my secret. "), False),  # over bytes the question is learned, too
        ("user: my secret, without a reply", False),
    ],
)
def test_conversations_of_the_package_for_bytes(loaded, text, public):
    assert _PackageDialogues(loaded).has(np.frombuffer(text.encode(), np.uint8).astype(np.int64)) is public
