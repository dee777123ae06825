"""Sources as one byte string: their chunks, the order of files and splits, and errors."""

import gzip

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.config import DataConfig, SourceConfig
from niels_gpt.data.byte_split import (
    ByteChunk,
    byte_chunks,
    byte_split_files,
    bytes_between,
    iter_byte_split,
)
from niels_gpt.data.reading.local import DataUnavailable
from niels_gpt.data.registry import describe, get_source
from tests.data import serve_in_turn, write_rows

EVERY_BYTE = bytes(range(256)) * 3 + b"\r\n\xff\xfe\xed\xa0\x80"


@pytest.fixture(autouse=True)
def no_local_data(monkeypatch):
    monkeypatch.delenv("NIELS_GPT_DATA", raising=False)


def source(path, **options):
    return SourceConfig(str(path), **{"split": (0.5, 0.5), **options})


def read(path, **options):
    return list(byte_chunks("mine", source(path, **options)))


def joined_bytes(path, **options):
    return b"".join(chunk.data for chunk in read(path, **options))


# --- plain files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "packed"), [("enwik8", False), ("data.bin", True), ("a.txt", True), ("b.MD", False)])
def test_a_plain_file_is_its_bytes(tmp_path, name, packed):
    file = tmp_path / (name + ".gz" * packed)
    halves = EVERY_BYTE[:100], EVERY_BYTE[100:]  # two members of a gzip file
    file.write_bytes(b"".join(gzip.compress(half, mtime=0) if packed else half for half in halves))
    assert read(file) == [ByteChunk(file.name, EVERY_BYTE)]
    assert byte_split_files("mine", source(file)) == [str(file)]


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (["b.txt", "a.md", "c/a.txt"], ["a.md", "b.txt", "c/a.txt"]),
        (["test.txt", "train.txt", "valid.txt"], ["train.txt", "valid.txt", "test.txt"]),
        (["test_2.txt", "test_1.txt", "zebra.txt", "dev.txt"], ["zebra.txt", "dev.txt", "test_1.txt", "test_2.txt"]),
        (["en-00001-of-00002.txt", "en-00000-of-00002.txt"], ["en-00000-of-00002.txt", "en-00001-of-00002.txt"]),
    ],
)
def test_a_folder_of_texts_is_the_files_end_to_end(tmp_path, names, order):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(EVERY_BYTE + name.encode())
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "picture.png").write_bytes(b"not this")
    assert read(tmp_path) == [ByteChunk(name, EVERY_BYTE + name.encode()) for name in order]


def test_a_folder_of_compressed_texts_is_their_bytes(tmp_path):
    for name in ("b.txt.gz", "a.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress(EVERY_BYTE + name.encode(), mtime=0))
    assert read(tmp_path) == [ByteChunk(name, EVERY_BYTE + name.encode()) for name in ("a.txt.gz", "b.txt.gz")]


@pytest.mark.parametrize("name", ["a.zip", "a.tar.gz", "a.XZ"])
def test_archives_are_an_error(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(ValueError, match="unpack"):
        read(tmp_path / name)


@pytest.mark.parametrize("data", [b"no gzip data at all", gzip.compress(EVERY_BYTE * 99, mtime=0)[:-20]])
def test_damaged_gzip_data(tmp_path, data):
    (tmp_path / "x.gz").write_bytes(data)
    with pytest.raises(ValueError, match=r"x\.gz.*gzip"):
        read(tmp_path / "x.gz")


def test_a_missing_path_and_an_empty_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"mine.*nowhere.*--source mine=PATH"):
        read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"\.jsonl"):
        read(tmp_path)


# --- rows --------------------------------------------------------------------------------------------

ROWS = [{"text": text} for text in ("one\n", "", " \t", "zwei é", None, "\n")]


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.parquet"])
def test_rows_are_joined_without_a_separator(tmp_path, name):
    """White space counts, rows without text add nothing, and names have the row number."""
    file = write_rows(tmp_path / name, ROWS)
    wanted = [(0, "one\n"), (2, " \t"), (3, "zwei é"), (5, "\n")]
    for path in (file, tmp_path):
        assert read(path) == [ByteChunk(f"row {i}", text.encode()) for i, text in wanted]
        assert byte_split_files("mine", source(path)) == [str(file)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_splits_of_files_come_in_order(tmp_path, kind):
    for split in ("test", "train", "validation"):
        write_rows(tmp_path / f"{split}.{kind}", [{"text": f"{split} {i}."} for i in range(2)])
    assert [chunk.name for chunk in read(tmp_path)] == [
        f"{split} row {i}" for split in ("train", "validation", "test") for i in range(2)
    ]
    assert joined_bytes(tmp_path) == b"train 0.train 1.validation 0.validation 1.test 0.test 1."
    assert joined_bytes(tmp_path / f"test.{kind}") == b"test 0.test 1."  # a single file


def test_a_split_with_another_name(tmp_path):
    for name in ("en", "train"):
        write_rows(tmp_path / f"{name}-00000-of-00001.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"'en'.*train, validation and test"):
        read(tmp_path)


def test_all_rows_use_the_same_field(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"text": None, "url": "no"}, {"text": "yes", "url": "no"}])
    assert joined_bytes(file) == b"yes"
    assert joined_bytes(file, field="url") == b"nono"
    with pytest.raises(ValueError, match=r"mine.*'body'.*text, url"):
        read(file, field="body")


@pytest.mark.parametrize("field", ["", "messages"])
def test_chats_are_an_error(tmp_path, field):
    file = write_rows(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(ValueError, match=r"^(data\.sources\.)?mine: .*text"):
        read(file, field=field)


def test_several_columns_of_text_are_an_error(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"question": "q", "reply": "a", "id": "7"}])
    with pytest.raises(ValueError, match="question, reply, id") as caught:
        read(file)
    assert "field" in str(caught.value) and "assistant" not in str(caught.value)  # split needs text, not a chat
    assert joined_bytes(file, field="reply") == b"a"


# --- the Hub -----------------------------------------------------------------------------------------


def table(*texts):
    return datasets.Dataset.from_list([{"text": text} for text in texts])


@pytest.mark.parametrize(("revision", "options"), [("", {}), ("@refs/convert/parquet", "refs/convert/parquet")])
def test_a_dataset_of_the_hub(monkeypatch, revision, options):
    splits = datasets.DatasetDict({"test": table("c\n"), "train": table("a ", "b"), "validation": table("?")})
    calls = serve_in_turn(monkeypatch, splits)
    path = f"hub:karpathy/tiny_shakespeare{revision}"
    assert joined_bytes(path) == b"a b?c\n"
    assert calls == [(("karpathy/tiny_shakespeare",), {"revision": options} if options else {})]
    assert byte_split_files("mine", source(path)) == []


def test_files_with_the_rows_of_a_hub_id(tmp_path, monkeypatch):
    """Text files are read unchanged, without `datasets`, which normalizes line ends."""
    monkeypatch.setenv("NIELS_GPT_DATA", str(tmp_path))
    file = tmp_path / "tiny_shakespeare" / "input.txt"
    file.parent.mkdir()
    file.write_bytes(EVERY_BYTE)
    assert joined_bytes("hub:karpathy/tiny_shakespeare") == EVERY_BYTE
    assert byte_split_files("mine", source("hub:karpathy/tiny_shakespeare")) == [str(file)]


def test_a_dataset_that_is_a_script(monkeypatch):
    serve_in_turn(monkeypatch, RuntimeError("Dataset scripts are no longer supported, but found tiny.py"))
    with pytest.raises(DataUnavailable, match=r"--source mine=PATH, or hub:a/tiny@refs/convert/parquet"):
        read("hub:a/tiny")
    with pytest.raises(DataUnavailable) as caught:
        read("hub:a/tiny@main")
    assert "refs/convert" not in str(caught.value)


@settings(max_examples=60)
@given(st.lists(st.binary(min_size=1, max_size=6), max_size=6), st.data())
def test_every_byte_of_a_part_has_its_chunk(datas, data):
    chunks = [ByteChunk(f"piece {i}", part) for i, part in enumerate(datas)]
    joined = b"".join(datas)
    first = data.draw(st.integers(0, len(joined)))
    end = data.draw(st.integers(first, len(joined)))
    part, names, starts = bytes_between(chunks, first, end)
    assert part == joined[first:end]
    owners = [(i, j) for i, part in enumerate(datas) for j in range(len(part))]  # chunk and offset of each byte
    assert len(names) == len(starts) == len({i for i, _ in owners[first:end]})
    for at in range(end - first):
        k = max(k for k, start in enumerate(starts) if start <= at)
        name, _, skipped = names[k].partition(" from byte ")
        assert (name, int(skipped or 0) + at - starts[k]) == (f"piece {owners[first + at][0]}", owners[first + at][1])


# --- samples -----------------------------------------------------------------------------------------


def test_chunks_as_samples(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"text": f"text {i} é"} for i in range(5)])
    config = source(file)
    samples = list(iter_byte_split("mine", config))
    assert [(s.text, s.source, s.meta) for s in samples] == [
        (f"text {i} é", "mine", {"piece": f"row {i}"}) for i in range(5)
    ]
    assert list(iter_byte_split("mine", config, take=2)) == samples[:2]
    mixed = list(iter_byte_split("mine", config, shuffle=True, seed=3))
    assert mixed != samples and sorted(mixed, key=lambda s: s.text) == samples
    with pytest.raises(ValueError, match=r"mine.*'test'"):
        next(iter_byte_split("mine", config, split="test"))


def test_chunks_that_are_not_utf8(tmp_path):
    (tmp_path / "x").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"mine, x,.*utf-8.*offset 3"):
        list(iter_byte_split("mine", source(tmp_path / "x")))
    assert [s.text for s in iter_byte_split("mine", source(tmp_path / "x"), errors="replace")] == ["caf\ufffd"]


def test_in_the_registry(tmp_path, monkeypatch):
    (tmp_path / "enwik8").write_bytes(b"a text")
    here, hub = source(tmp_path / "enwik8"), source("hub:a/b")
    data = DataConfig(sources={"here": here, "hub": hub})
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert (describe(get_source("here", data))["kind"], describe(get_source("here", data))["from"]) == ("text", "local")
    assert (describe(get_source("hub", data))["kind"], describe(get_source("hub", data))["from"]) == ("text", "hub")
    made = get_source("here", data)
    assert [sample.text for sample in made.samples(take=1, stats={})] == ["a text"]
    (tmp_path / "other").write_bytes(b"another")
    assert [sample.text for sample in made.samples(path=tmp_path / "other")] == ["another"]
    assert made.files(None, None) == [str(tmp_path / "enwik8")]
    assert made.options == {"split": "0.5, 0.5"}
