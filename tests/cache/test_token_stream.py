"""The token stream of a split and its documents, compared with the concatenated shards."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache import mmap
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.token_stream import TokenStream
from tests.cache import EOT, build_pretrain, meta_of, quick_folder, stream_of

TEXTS = ["once upon a time", "b", "two\n\nparagraphs of a note", "é 日本", "x" * 70, "the end"]
"""With shards of 16 tokens, documents end within shards and span up to five of them."""


def expected(texts=TEXTS):
    """The tokens of each document."""
    return [[*text.encode("utf-8"), EOT] for text in texts]


def plain(texts=TEXTS):
    return [token for ids in expected(texts) for token in ids]


@pytest.fixture
def cache(tmp_path):
    return build_pretrain(TEXTS, tmp_path / "cache")


@pytest.fixture
def stream(cache):
    return TokenStream(cache / "train")


def read(stream, start, number, dtype=np.uint16):
    out = np.empty(number, dtype=dtype)
    assert stream.read(start, out) is None
    return out.tolist()


# --- tokens ------------------------------------------------------------------------------------------


def test_stream_is_the_concatenated_shards(cache, stream):
    on_disk = stream_of(cache)
    assert on_disk == plain()
    assert stream.num_tokens == len(on_disk)
    assert len(stream.shards) == -(-len(on_disk) // 16)
    assert read(stream, 0, len(on_disk)) == on_disk


@settings(max_examples=25)
@given(st.lists(st.text("abé", min_size=1, max_size=30), min_size=1, max_size=8), st.integers(1, 20), st.data())
def test_any_stream_and_any_slice(texts, shard_tokens, data):
    with quick_folder() as folder:
        stream = TokenStream(build_pretrain(texts, folder / "cache", shard_bytes=2 * shard_tokens) / "train")
        tokens = plain(texts)
        assert stream.num_tokens == len(tokens)
        start = data.draw(st.integers(0, len(tokens)))
        number = data.draw(st.integers(0, len(tokens) - start))
        assert read(stream, start, number) == tokens[start : start + number]
        assert [stream.document(i).tolist() for i in range(len(texts))] == expected(texts)
        assert stream.document_lengths().tolist() == [len(ids) for ids in expected(texts)]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_read_into_any_integer_type(stream, dtype):
    frame = np.zeros((2, 30), dtype=dtype)
    stream.read(3, frame[1, 4:24])  # a slice of a row
    assert frame[1].tolist() == [0] * 4 + plain()[3:23] + [0] * 6
    assert not frame[0].any()


@pytest.mark.parametrize(("start", "number"), [(-1, 3), (-5, 0), (0, 135), (133, 2), (134, 1), (1000, 1), (135, 0)])
def test_slice_outside_the_stream_raises(stream, start, number):
    assert stream.num_tokens == 134
    out = np.full(number, 7, dtype=np.uint16)
    with pytest.raises(ValueError, match=rf"134 tokens.*{start:,}"):
        stream.read(start, out)
    assert set(out.tolist()) <= {7}


def test_opening_reads_no_shard(cache, monkeypatch):
    monkeypatch.setattr(mmap.MappedTokens, "read", lambda *_: pytest.fail("a shard was read"))
    stream = TokenStream(cache / "train")
    assert stream.num_tokens == len(plain())
    assert stream.document_lengths().tolist() == [len(ids) for ids in expected()]


def test_only_needed_shards_are_read(cache, monkeypatch):
    monkeypatch.setattr(mmap, "MAX_OPEN", 1)
    stream = TokenStream(cache / "train")
    starts = stream.documents.tolist()
    first = starts[4] // 16
    for path in sorted((cache / "train").glob("shard_*.bin"))[:first]:
        path.unlink()
    assert stream.document(4).tolist() == expected()[4]
    with pytest.raises(CacheError, match=r"cannot open .*shard_00000"):
        stream.document(0)


# --- documents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [-1, 6, 1000])
def test_document_past_the_end_raises(stream, number):
    with pytest.raises(IndexError, match=rf"6 documents.*{number}"):
        stream.document(number)


def test_document_cut_by_the_budget(tmp_path):
    cache = build_pretrain(TEXTS, tmp_path / "cache", max_train_tokens=30)
    stream = TokenStream(cache / "train")
    assert stream.num_tokens == 30
    assert stream.document_lengths().tolist() == [17, 2, 11]
    assert stream.document(2).tolist() == expected()[2][:11]


# --- damaged files -----------------------------------------------------------------------------------


def test_tokens_can_be_read_without_offsets(cache):
    (cache / "train" / "documents.npy").unlink()
    stream = TokenStream(cache / "train")
    assert read(stream, 0, 20) == plain()[:20]
    for ask in (stream.document_lengths, lambda: stream.document(0), lambda: stream.documents):
        with pytest.raises(CacheError, match=r"documents\.npy.*build the cache again"):
            ask()


@pytest.mark.parametrize(
    "starts",
    [
        np.array([0, 17, 17, 40]),
        np.array([0, 30, 20]),
        np.array([[0, 17]]),
        np.array([0.0, 17.0]),
        np.array([0, 17, 1000]),  # past the last token
        np.array([-4, 17]),
    ],
    ids=["equal", "decreasing", "rows", "floats", "past the end", "negative"],
)
def test_invalid_offsets_raise(cache, starts):
    np.save(cache / "train" / "documents.npy", starts)
    with pytest.raises(CacheError, match=r"documents\.npy"):
        TokenStream(cache / "train").document_lengths()


def test_offsets_are_not_unpickled(cache):
    """A .npy can contain pickled objects, which may run code when loaded."""
    np.save(cache / "train" / "documents.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(CacheError, match=r"documents\.npy"):
        TokenStream(cache / "train").document_lengths()


def test_missing_or_truncated_shards_raise(cache):
    path = cache / "train" / "shard_00002.bin"
    content = path.read_bytes()
    (cache / "train" / "shard_00099.bin").write_bytes(b"ab")
    with pytest.raises(CacheError, match=r"shard_00099\.bin.*not listed"):
        TokenStream(cache / "train")
    (cache / "train" / "shard_00099.bin").unlink()
    path.write_bytes(content[:-2])
    with pytest.raises(CacheError, match=r"shard_00002\.bin.*\b30\b.*\b32\b"):
        TokenStream(cache / "train")
    path.unlink()
    with pytest.raises(CacheError, match=r"shard_00002\.bin is missing"):
        TokenStream(cache / "train")
    with pytest.raises(CacheError, match="no folder of shards"):
        TokenStream(cache / "test")


def test_verify_finds_changed_files(cache):
    path = cache / "train" / "shard_00001.bin"
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(bytes(content))
    opened = TokenStream(cache / "train")
    with pytest.raises(CacheError, match=r"shard_00001\.bin is damaged .*bytes 0 to 31 .*cache verify .*/cache, and"):
        opened.document(1)
    with pytest.raises(CacheError, match=r"shard_00001\.bin is damaged"):
        TokenStream(cache / "train", verify=True)
    content[3] ^= 1
    path.write_bytes(bytes(content))
    TokenStream(cache / "train", verify=True)
    np.save(cache / "train" / "documents.npy", np.array([0, 17, 19, 45, 54, 126], dtype="<i8"))  # 54 was 55
    with pytest.raises(CacheError, match=r"documents\.npy is damaged"):
        TokenStream(cache / "train", verify=True)


@pytest.mark.parametrize("used", [False, True])
def test_pickled_stream_reads_the_same_files(stream, used):
    if used:
        stream.document(4)
    again = pickle.loads(pickle.dumps(stream))
    assert [again.document(i).tolist() for i in range(6)] == expected()
    assert len(pickle.dumps(stream)) < 10_000


def test_relative_folder_and_a_meta_without_a_list_of_files(cache, monkeypatch):
    meta = meta_of(cache)
    del meta["files"]
    (cache / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    monkeypatch.chdir(cache / "train")
    stream = TokenStream(".")
    assert stream.document(0).tolist() == expected()[0]
    assert stream.meta == meta and stream.folder == cache / "train"
    assert TokenStream("..").folder == cache
    with pytest.raises(CacheError, match="tokenizer"):
        TokenStream(cache / "train", tokenizer_sha256="cd" * 32)


def test_shards_without_a_meta(cache):
    (cache / "meta.json").unlink()
    stream = TokenStream(cache / "train")
    assert stream.meta is None and read(stream, 0, 134) == plain()
    with pytest.raises(CacheError, match=r"meta\.json.*tokenizer"):
        TokenStream(cache / "train", tokenizer_sha256="ab" * 32)
    path = cache / "train" / "shard_00001.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CacheError, match=r"shard_00001\.bin.*31 bytes"):
        TokenStream(cache / "train")


def test_ids_past_the_vocabulary_are_named(stream):
    stream.check_document(3, np.array([5, 259]), 260)
    stream.check_document(3, np.array([], dtype=np.uint16), 260)
    with pytest.raises(CacheError, match=r"document 3 .*260.*0\.\.259"):
        stream.check_document(3, np.array([5, 260]), 260)
