"""The index of a source on disk: its text, documents and held-out passages; damage, modes and cleaning."""

from __future__ import annotations

import stat

import numpy as np
import pytest

from niels_gpt.memorization import text_index
from niels_gpt.memorization.membership import RunSource
from niels_gpt.memorization.suffix_search import PAD
from niels_gpt.memorization.text_index import EXCERPTS, build_index, index_key, open_index
from niels_gpt.streams import Stream
from niels_gpt.system.files import sha256_bytes
from niels_gpt.system.user_cache import cache_folder, list_entries, remove_entry
from niels_gpt.tokenizer import ByteTokenizer
from niels_gpt.training.tasks.documents import ByteDocumentSet
from tests import token_caches


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg" / "niels-gpt" / "indexes"


def byte_documents(texts, names=None):
    """Documents of a byte stream, with blank lines between them."""
    data = [text.encode() for text in texts]
    starts = np.cumsum([0, *(len(text) + 2 for text in data)])[:-1].tolist() if data else []
    joined = b"\n\n".join(data)
    return ByteDocumentSet(Stream(joined, sha256_bytes(repr(texts).encode()), True, names, starts, gap=2))


class TokenDocuments:
    """Documents as lists of ids."""

    sha256 = "of tokens"

    def __init__(self, rows):
        self._rows = [np.array(row) for row in rows]
        self.lengths = np.array([len(row) for row in rows])

    def name(self, i):
        return f"conversation {i}"

    def file(self, i):
        return None

    def ids(self, i):
        return self._rows[i]


def source_of(train, held_out=None, *, chosen=None, tokenizer=None, name="roam"):
    return RunSource(
        name=name,
        config=None,
        train=train,
        chosen=range(len(train.lengths)) if chosen is None else chosen,
        held_out=byte_documents([]) if held_out is None else held_out,
        changed="",
        path="/notes",
        tokenizer=tokenizer or ByteTokenizer(),
        fingerprint={name: train.sha256},
    )


TEXTS = ["The first note.\nIt has two lines.", "", "Ünïcödé 日本 🙂 everywhere", "the last one"]
NAMES = ["/notes/a.md", "/notes/b.md", "/notes/sub/c.md", "dialogue 3"]


def test_passages_have_document_file_and_surroundings():
    index = build_index(source_of(byte_documents(TEXTS, NAMES)))
    matches = index.search.find("xödé 日本x".encode(), 5)
    (position,), length = matches.position, int(matches.end[0] - matches.start[0])
    passage = index.passage(int(position), length, 4)
    assert passage == ("roam", "c.md", "/notes/sub/c.md", len("Ünïc".encode()), "Ünïc", "ödé 日本", " 🙂 e")
    last = index.passage(int(index.search.find(b"the last one", 5).position[0]), 12, 40)
    assert last == ("roam", "dialogue 3", None, 0, "", "the last one", "")
    assert index.size == sum(len(text.encode()) for text in TEXTS)


@pytest.mark.parametrize("batch", [1, 20, 1 << 20])
def test_only_the_chosen_documents_are_indexed(monkeypatch, batch):
    monkeypatch.setattr(text_index, "_BATCH", batch)
    index = build_index(source_of(byte_documents(TEXTS, NAMES), chosen=[3, 0]))
    expected = PAD + b"the last one\xff" + TEXTS[0].encode() + PAD
    assert (index.folder / "text.bin").read_bytes() == expected
    assert index.passage(len(PAD) + 13, 3, 0).document == "a.md"


def test_no_documents():
    index = build_index(source_of(byte_documents([])))
    assert index.size == 0 and not len(index.search.find(b"anything", 1).start) and index.held_out == []


def test_tokens_are_decoded_with_separators_in_place_of_special_tokens():
    tokenizer = token_caches.tokenizer()
    usr, asst, eot = (token_caches.special(name) for name in ("usr", "asst", "eot"))
    texts = token_caches.documents("roam")[:3]
    rows = [[usr, *tokenizer.encode("why?"), eot, asst, *tokenizer.encode(text), eot] for text in texts]
    index = build_index(source_of(TokenDocuments(rows), tokenizer=tokenizer))
    expected = b"\xff".join(b"\xffwhy?\xff\xff" + text.encode() + b"\xff" for text in texts)
    assert (index.folder / "text.bin").read_bytes() == PAD + expected + PAD
    query = texts[1].encode()
    found = index.search.find(query, len(query))
    passage = index.passage(int(found.position[-1]), len(query), 9)
    assert (passage.document, passage.before, passage.text) == ("conversation 1", "\nwhy?\n\n", texts[1])


@pytest.mark.parametrize("size", [1, 3000, 200_000])
def test_held_out_passages_are_of_the_held_out_documents(size):
    letters = np.random.default_rng(0).integers(97, 123, size, dtype=np.uint8).tobytes().decode()
    texts = [letters[: size // 3], letters[size // 3 :]]
    passages = build_index(source_of(byte_documents(["train"]), byte_documents(texts))).held_out
    assert all(any(passage in text for text in texts) for passage in passages)
    if size > 100_000:
        assert len(passages) == EXCERPTS and sum(map(len, passages)) == EXCERPTS * text_index.EXCERPT_BYTES
    else:
        assert passages == [text for text in texts if text]


def test_an_index_is_found_by_its_content(cache):
    source = source_of(byte_documents(TEXTS))
    key = index_key("roam", {"roam": source.train.sha256, "tokenizer": "x"}, None)
    assert open_index(key) is None
    assert build_index(source).key == key
    assert open_index(key).size == sum(len(text.encode()) for text in TEXTS)
    assert open_index(index_key("roam", {"roam": "other"}, None)) is None
    assert open_index(index_key("roam", {"roam": source.train.sha256}, "tokenizer")) is None


@pytest.mark.parametrize("name", ["text.bin", "suffixes.bin", "documents.npy", "held_out.json", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_index_is_built_again(name, damage):
    source = source_of(byte_documents(TEXTS))
    index = build_index(source)
    path = index.folder / name
    content = path.read_bytes()
    if damage == "flip":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    elif damage == "truncate":
        path.write_bytes(content[:-4])
    else:
        path.unlink()
    assert open_index(index.key) is None
    rebuilt = build_index(source)
    assert path.read_bytes() == content
    assert len(rebuilt.search.find(b"The first note.", 8).start) == 1


def test_only_the_owner_can_read_it_and_clean_removes_it(cache):
    folder = build_index(source_of(byte_documents(TEXTS))).folder
    assert folder.parent == cache
    for each in (folder, cache, cache_folder()):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    (entry,) = list_entries()
    assert entry.path == folder and "roam (/notes)" in entry.what
    assert entry.bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert remove_entry(entry)
    assert not folder.exists()


def test_a_large_text_has_sampled_suffixes(monkeypatch):
    monkeypatch.setattr(text_index, "DENSE_BYTES", 10)
    index = build_index(source_of(byte_documents(TEXTS)))
    assert index.search.stride == text_index.STRIDE
    matches = index.search.find(b"It has two lines", 15)
    assert (matches.start.tolist(), matches.end.tolist()) == ([0], [16])
