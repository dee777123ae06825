"""Sources at URLs give the samples, and the caches, of the same files in a local folder."""

import gzip
import hashlib
import json
import uuid
from unittest import mock

import fsspec
import pyarrow
import pytest
from pyarrow import parquet

from niels_gpt.cache.sources import texts
from niels_gpt.cache.sources.build import build
from niels_gpt.cache.sources.texts import BuildSettings
from niels_gpt.config import DataConfig, NotesConfig, SourceConfig
from niels_gpt.data.reading import url_rows
from niels_gpt.data.reading.local import DataUnavailable
from niels_gpt.data.registry import get_source
from niels_gpt.data.url_files import iter_url_files, url_hashes
from niels_gpt.data.user_files import iter_user_files
from niels_gpt.system.executors import ThreadExecutor
from tests.cache import real_tokenizer, tree

TEXTS = [f"row {i}: " + "é word " * (i % 9) + ("\n" * (i % 2)) for i in range(120)]
ROWS = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
ROWS[7]["text"] = "  "
CHATS = [{"prompt": f"question {i}?", "response": "yes " * (1 + i % 4)} for i in range(40)]


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def as_parquet(rows):
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=17)
    return sink.getvalue().to_pybytes()


FOLDERS = {
    "lines": {"b.jsonl": lines(ROWS[:50]), "a/c.jsonl": lines(ROWS[50:]), ".hidden.jsonl": lines(ROWS)},
    "no final newline": {"b.jsonl": lines(ROWS).rstrip(b"\n")},
    "bom and blank lines": {"b.jsonl": b"\xef\xbb\xbf" + lines(ROWS[:9]) + b"\n\n" + lines(ROWS[9:])},
    "compressed lines": {"b.jsonl.gz": gzip.compress(lines(ROWS)), "README.md": b"# about"},
    "list": {"b.json": json.dumps(ROWS).encode()},
    "list in jsonl": {"b.jsonl": b" [" + b",\n".join(json.dumps(row).encode() for row in ROWS) + b"]"},
    "parquet": {f"train-0000{i}-of-00002.parquet": as_parquet(ROWS[70 * i :][:70]) for i in range(2)},
    "texts": {f"{i}.md": text.encode() for i, text in enumerate(TEXTS)} | {"z.txt.gz": gzip.compress(b"packed")},
    "chats": {"b.jsonl": lines(CHATS)},
    "a split": {"train.jsonl": lines(ROWS[:30]), "val.jsonl": lines(ROWS[30:])},
}  # fmt: skip


@pytest.fixture
def place(tmp_path):
    """Write files to a local folder and to a URL; returns both."""
    url = f"memory://bucket-{uuid.uuid4().hex}/data"
    filesystem, path = fsspec.core.url_to_fs(url)

    def write(files):
        folder = tmp_path / "data"
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
            filesystem.pipe_file(f"{path}/{name}", data)
        return folder, url

    yield write
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


@pytest.fixture(autouse=True)
def small_parts():
    with mock.patch.object(url_rows, "PART_BYTES", 300):
        yield


def content(sample):
    return sample.text if hasattr(sample, "text") else [(m.role, m.content) for m in sample.messages]


@pytest.mark.parametrize("files", FOLDERS.values(), ids=FOLDERS)
def test_samples_are_those_of_the_local_folder(files, place):
    folder, url = place(files)
    mine, theirs = {}, {}
    local = [content(s) for s in iter_user_files("x", SourceConfig(str(folder)), stats=mine)]
    remote = [content(s) for s in iter_url_files("x", SourceConfig(url), stats=theirs, executor=ThreadExecutor(3))]
    assert remote == local
    assert theirs == mine
    assert len(remote) >= 29
    assert [content(s) for s in iter_url_files("x", SourceConfig(url), take=5)] == local[:5]


@pytest.mark.parametrize("part_bytes", [1, 7, 64, 1000, 10**6])
def test_every_line_is_read_once(part_bytes, place):
    _, url = place({"b.jsonl": lines(ROWS)})
    with mock.patch.object(url_rows, "PART_BYTES", part_bytes):
        found = url_rows.list_url(url)
        rows = [row for part in url_rows.parts_of(found) for piece in url_rows.read_part(part) for row in piece.rows]
    assert rows == ROWS


def test_one_file_may_be_the_url(place):
    _, url = place({"b.jsonl": lines(ROWS)})
    assert len(list(iter_url_files("x", SourceConfig(f"{url}/b.jsonl")))) == 119


@pytest.mark.parametrize("name", ["lines", "parquet", "texts", "chats"])
def test_a_cache_of_a_url_is_that_of_the_local_folder(name, place, tmp_path):
    caches = []
    for number, where in enumerate(place(FOLDERS[name])):
        source = get_source("mine", DataConfig(sources={"mine": SourceConfig(str(where))}))
        settings = BuildSettings(tmp_path / f"cache_{number}", shard_bytes=1000, executor=ThreadExecutor(2))
        result = build(source, settings, real_tokenizer())
        assert build(source, settings, real_tokenizer()).state == "up to date"
        caches.append(tree(result.folder))
    assert caches[0] == caches[1]
    assert len(caches[0]) > 5


def test_a_damaged_line_is_named(place):
    _, url = place({"b.jsonl": lines(ROWS[:20]) + b"{nonsense\n" + lines(ROWS)})
    with pytest.raises(ValueError, match=rf"^cannot read {url}/b.jsonl \(from byte [\d,]+ on\): line \d+ is not JSON"):
        list(iter_url_files("x", SourceConfig(url)))


def test_damaged_parquet_is_named(place):
    _, url = place({"b.parquet": as_parquet(ROWS)[:-40]})
    with pytest.raises(ValueError, match=f"cannot read {url}/b.parquet: it is damaged, or no parquet file"):
        list(iter_url_files("x", SourceConfig(url)))


def test_a_file_that_changes_or_is_not_shared_is_refused(place):
    _, url = place({"b.jsonl": lines(ROWS)})
    file = url_rows.list_url(url)[0]
    with pytest.raises(ValueError, match="it has changed since it was listed"):
        list(url_rows.read_part(url_rows.FilePart(file._replace(bytes=5), "lines")))
    there = file._replace(process="other:1")  # as a node of a cluster sees what the driver has listed
    with pytest.raises(ValueError, match=r"has [\d,]+ bytes instead of 5 on the node \S+: the folder is not shared"):
        list(url_rows.read_part(url_rows.FilePart(there._replace(bytes=5), "lines")))
    with pytest.raises(ValueError, match=r"is missing on the node \S+: the folder is not shared"):
        list(url_rows.hash_file(there._replace(url=f"{url}/c.jsonl")))
    with pytest.raises(ValueError, match=r"is missing on the node \S+: the folder is not shared"):
        url_rows.check_sizes([file, there._replace(url=f"{url}/c.jsonl")])


@pytest.mark.parametrize("name", ["lines", "compressed lines", "parquet", "texts", "list in jsonl"])
def test_rows_come_from_the_bytes_that_were_hashed(name, place):
    folder, url = place(FOLDERS[name])
    hashed = url_hashes(url)
    samples = [content(s) for s in iter_url_files("x", SourceConfig(url), hashed=hashed)]
    assert samples == [content(s) for s in iter_user_files("x", SourceConfig(str(folder)))]
    last = hashed[-1].file
    data = fsspec.filesystem("memory").cat_file(last.url)
    assert hashed[-1].sha256 == hashlib.sha256(data).hexdigest()
    place({last.url.removeprefix(f"{url}/"): changed(data, last.url)})  # the same size
    with pytest.raises(ValueError, match=rf"^{last.url} has changed since it was hashed: start again$"):
        list(iter_url_files("x", SourceConfig(url), hashed=hashed))
    there = [each._replace(process="another-node:1") for each in hashed]
    with pytest.raises(
        ValueError, match=rf"^{last.url} on the node \S+ is not what was hashed on the node another-node: "
    ):
        list(iter_url_files("x", SourceConfig(url), hashed=there))


def changed(data, name):
    """The same number of bytes, which still parse, with other text."""
    if name.endswith(".gz"):
        text = gzip.decompress(data)
        other = gzip.compress(text, mtime=123456)
        assert len(other) == len(data)
        return other
    at = data.rindex(b"word") if b"word" in data else 10
    return data[:at] + b"WORD" + data[at + 4 :]


def test_a_build_reads_the_bytes_that_it_hashed(place, tmp_path, monkeypatch):
    _, url = place({"b.jsonl": lines(ROWS)})
    source = get_source("mine", DataConfig(sources={"mine": SourceConfig(url)}))
    settings = BuildSettings(tmp_path / "cache", shard_bytes=1000)
    hashes = texts.url_hashes

    def then_change(*arguments):
        found = hashes(*arguments)
        place({"b.jsonl": lines(ROWS).replace(b"word", b"WORD")})
        return found

    monkeypatch.setattr(texts, "url_hashes", then_change)
    with pytest.raises(ValueError, match=r"b\.jsonl has changed since it was hashed"):
        build(source, settings, real_tokenizer())
    assert not (tmp_path / "cache" / "pretrain" / "mine").exists()
    assert build(source, settings, real_tokenizer()).state == "built"


def test_a_large_row_group_comes_in_pieces(place, monkeypatch):
    rows = [{"text": f"{i} " + "word " * (i % 40)} for i in range(1000)]
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=600, use_dictionary=False)
    _, url = place({"b.parquet": sink.getvalue().to_pybytes(), "c.jsonl.gz": gzip.compress(lines(rows))})
    monkeypatch.setattr(url_rows, "PIECE_BYTES", 8000)
    monkeypatch.setattr(url_rows, "BLOCK_BYTES", 512)
    parts = list(url_rows.parts_of(url_rows.list_url(url)))
    assert [part.kind for part in parts] == ["parquet", "parquet", "rows"]
    read = [list(url_rows.read_part(part)) for part in parts]
    assert [len(pieces) for pieces in read] == [part.pieces for part in parts]
    assert parts[0].pieces > 5
    assert all(sum(len(row["text"]) for row in piece.rows) < 20_000 for pieces in read[:2] for piece in pieces)
    assert [row for pieces in read for piece in pieces for row in piece.rows] == rows + rows


def test_what_needs_local_files_is_refused(place):
    _, url = place({"b.md": b"text"})
    config = SourceConfig(url)
    for options in ({"errors": "skip"}, {"shuffle": True}, {"notes": NotesConfig(exclude=("a",))}):
        with pytest.raises(ValueError, match=url):
            list(iter_url_files("x", config, **options))
    with pytest.raises(ValueError, match="byte streams need local files"):
        list(iter_user_files("x", config))


def test_nothing_at_a_url():
    with pytest.raises(DataUnavailable, match="there is no file at memory://nothing/here"):
        list(iter_url_files("x", SourceConfig("memory://nothing/here")))
