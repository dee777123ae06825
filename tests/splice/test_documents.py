"""Documents as arrays or in a token cache."""

import numpy as np
import pytest

from niels_gpt.cache.build_cache import build_pretrain_cache
from niels_gpt.cache.formats import CacheError
from niels_gpt.splice.documents import MAX_ID, ArrayDocuments, CacheDocuments, OpenCache
from tests.cache import EOT, UNLIMITED, ByteTokenizer


def read(documents, doc, t, length):
    out = np.full(length, -1, dtype=np.int32)
    documents.read(doc, t, out)
    return out.tolist()


def test_arrays_lists_and_bytes():
    documents = ArrayDocuments([[3, 1, 4], np.array([60_000, 5], dtype=np.uint16), b"abc", []])
    assert documents.lengths.tolist() == [3, 2, 3, 0]
    assert documents.lengths.dtype == np.int64
    assert read(documents, 0, 1, 2) == [1, 4]
    assert read(documents, 1, 0, 2) == [60_000, 5]
    assert read(documents, 2, 2, 1) == [99]


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_negative_ids_raise(dtype):
    for documents in ([np.array([1, -1], dtype=dtype)], [[0], np.array([-1], dtype=dtype), [0]]):
        with pytest.raises(ValueError, match=rf"0\.\.{MAX_ID}.*-1"):
            ArrayDocuments(documents)


def test_ids_up_to_31_bits():
    assert MAX_ID == 2**31 - 1
    assert read(ArrayDocuments([[0, MAX_ID]]), 0, 0, 2) == [0, MAX_ID]
    for dtype in (np.int64, np.uint32, np.uint64):
        with pytest.raises(ValueError, match=rf"0\.\.{MAX_ID}.*{MAX_ID + 1}"):
            ArrayDocuments([np.array([5, MAX_ID + 1], dtype=dtype)])


def test_ids_of_many_documents_are_checked_in_groups():
    """The check concatenates 10,000 documents at a time; a bad id is found in any group."""
    for position in (0, 9_999, 10_000, 20_000):
        documents = [[1]] * 20_001
        documents[position] = [-7]
        with pytest.raises(ValueError, match="-7"):
            ArrayDocuments(documents)


@pytest.mark.parametrize(
    ("documents", "named"),
    [
        ([], "empty"),
        (5, "5"),
        ([[1, 2], [[1, 2]]], r"document 1.*\(1, 2\)"),
        ([[1.5]], "document 0.*float"),
        ([[1], [[1], [2, 3]]], "document 1.*different lengths"),
    ],
)
def test_invalid_documents_are_named(documents, named):
    with pytest.raises(ValueError, match=named):
        ArrayDocuments(documents)


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents") / "cache"
    options = {"tokenizer": ByteTokenizer(), "max_train_tokens": UNLIMITED, "max_val_tokens": 0, "seed": 1}
    build_pretrain_cache(["abc", "de", "fghij"], str(folder), shard_bytes=8, shuffle_buffer=None, **options)
    return OpenCache(folder, "train", None).stream


def test_documents_of_a_cache(stream):
    documents = CacheDocuments(stream, [2, 0])
    assert documents.lengths.tolist() == [6, 4]
    assert documents.indices.tolist() == [2, 0]
    assert read(documents, 0, 1, 4) == [*b"ghij"]
    assert read(documents, 1, 2, 2) == [ord("c"), EOT]


@pytest.mark.parametrize(("indices", "named"), [([3], "3"), ([0, -1], "-1"), ([0, 1, 7, 9], "7")])
def test_indices_outside_the_cache_are_named(stream, indices, named):
    with pytest.raises(ValueError, match=rf"3 documents.*{named}$"):
        CacheDocuments(stream, indices)


@pytest.mark.parametrize("indices", [[1.0], ["1"], [[0]], 1, [True], [[0], [1, 2]]])
def test_indices_of_a_wrong_type_raise(stream, indices):
    with pytest.raises(ValueError, match=r"doc_indices.*list of integers"):
        CacheDocuments(stream, indices)
    assert len(CacheDocuments(stream, []).lengths) == 0


def test_ids_past_the_vocabulary_raise(stream):
    assert read(CacheDocuments(stream, [1], vocabulary=EOT + 1), 0, 0, 3) == [*b"de", EOT]
    documents = CacheDocuments(stream, [1], vocabulary=EOT)
    assert read(documents, 0, 0, 2) == [*b"de"]
    with pytest.raises(CacheError, match=f"document 1.*{EOT}"):
        read(documents, 0, 1, 2)
