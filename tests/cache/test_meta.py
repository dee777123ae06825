import errno
import hashlib
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.meta import check_file, check_listed, check_meta, open_meta, read_meta, write_meta

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
METAS = st.dictionaries(st.text(max_size=5).filter(lambda key: key != "format_version"), JSON, max_size=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("meta") / "meta.json"


# --- meta.json ---------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(meta=METAS)
def test_write_and_read_the_same_bytes_for_any_order(path, meta):
    write_meta(str(path), meta)
    assert read_meta(str(path)) == meta
    assert [file.name for file in path.parent.iterdir()] == ["meta.json"]
    first = path.read_bytes()
    write_meta(path, dict(reversed(meta.items())))
    assert path.read_bytes() == first
    write_meta(path, {**meta, "format_version": 1})
    assert open_meta(path.parent, tokenizer_sha256=None) == {**meta, "format_version": 1}


def test_format_is_readable_json(tmp_path):
    write_meta(tmp_path / "meta.json", {"b": 1, "a": "é"})
    text = (tmp_path / "meta.json").read_text(encoding="utf-8")
    checksum = hashlib.sha256(b'{"a":"\\u00e9","b":1}').hexdigest()
    assert text == f'{{\n  "a": "é",\n  "b": 1,\n  "checksum": "sha256:{checksum}"\n}}\n'


def test_failed_write_keeps_the_old_file(tmp_path):
    write_meta(tmp_path / "meta.json", {"a": 1})
    with pytest.raises(TypeError):
        write_meta(tmp_path / "meta.json", {"a": object()})
    assert read_meta(tmp_path / "meta.json") == {"a": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_missing_meta_raises(tmp_path):
    with pytest.raises(CacheError, match=r"no .*meta\.json.*build") as error:
        read_meta(tmp_path / "meta.json")
    assert isinstance(error.value, ValueError)
    assert open_meta(tmp_path, tokenizer_sha256=None) is None


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"\xff\xfe{}", b"[]", b"{} {}", b"[" * 10**5])
def test_damaged_meta_is_named(tmp_path, content):
    (tmp_path / "meta.json").write_bytes(content)
    for read in (lambda: read_meta(tmp_path / "meta.json"), lambda: open_meta(tmp_path, tokenizer_sha256=None)):
        with pytest.raises(CacheError, match=r"meta\.json.*damaged"):
            read()


@pytest.mark.parametrize("version", [3, 1000, "1", None, 1.5, [1]])
def test_unknown_format_version_raises(tmp_path, version):
    (tmp_path / "meta.json").write_text(json.dumps({"format_version": version}), encoding="utf-8")
    with pytest.raises(CacheError, match=re.escape(repr(version))):
        read_meta(tmp_path / "meta.json")


# --- checks of readers ---------------------------------------------------------------------------------


def test_matching_cache_passes(tmp_path):
    for meta in (
        {},
        {"token_dtype": "uint16-le", "tokenizer_sha256": "ab"},
        {"built": True},
        {"token_dtype": "uint32-le"},
    ):
        check_meta(meta, tmp_path, tokenizer_sha256=None)
    check_meta({"tokenizer_sha256": "ab"}, tmp_path, tokenizer_sha256="ab")


@pytest.mark.parametrize(
    ("meta", "wanted"),
    [
        ({"token_dtype": "uint64-le"}, "uint64-le.*uint16-le.*uint32-le"),
        ({"token_dtype": ["uint16-le"]}, "uint16-le.*expected"),
        ({"token_dtype": "uint16-be"}, "uint16-be"),
        ({"token_dtype": None}, "None"),
        ({"built": False, "reason": "no source was given"}, "not built.*no source was given"),
        ({"built": False}, "not built"),
        ({"tokenizer_sha256": "cd" * 32}, r"another tokenizer.* (cd){6}\.\.\..* (ab){6}\.\.\."),
        ({"tokenizer_sha256": None}, "another tokenizer"),
        ({}, "another tokenizer"),
    ],
)
def test_mismatched_cache_is_named_with_the_reason(tmp_path, meta, wanted):
    with pytest.raises(CacheError, match=wanted) as error:
        check_meta(meta, tmp_path / "the cache", tokenizer_sha256="ab" * 32)
    assert "the cache" in str(error.value)


@pytest.fixture
def listed(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"12")
    return {"files": {"a.bin": {"bytes": 2, "sha256": hashlib.sha256(b"12").hexdigest()}}}


def test_listed_file_passes(tmp_path, listed):
    check_file(listed, tmp_path, "a.bin")
    check_file(listed, tmp_path, "a.bin", verify=True)
    check_file({}, tmp_path, "a.bin", verify=True)  # a meta without a list of files


@pytest.mark.parametrize("verify", [False, True])
def test_missing_or_unlisted_file_is_named(tmp_path, listed, verify):
    (tmp_path / "b.bin").write_bytes(b"34")
    with pytest.raises(CacheError, match=r"b\.bin.*not listed"):
        check_file(listed, tmp_path, "b.bin", verify=verify)
    with pytest.raises(CacheError, match=r"c\.bin is missing"):
        check_file(listed, tmp_path, "c.bin", verify=verify)
    (tmp_path / "a.bin").unlink()
    (tmp_path / "a.bin").mkdir()
    with pytest.raises(CacheError, match=r"a\.bin is missing"):
        check_file(listed, tmp_path, "a.bin", verify=verify)


@pytest.mark.parametrize("data", [b"", b"1", b"123"])
def test_file_of_another_size_is_named(tmp_path, listed, data):
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(CacheError, match=rf"a\.bin has {len(data)} bytes.*\b2\b"):
        check_file(listed, tmp_path, "a.bin")


def test_verify_finds_a_changed_file(tmp_path, listed):
    (tmp_path / "a.bin").write_bytes(b"13")
    check_file(listed, tmp_path, "a.bin")
    with pytest.raises(CacheError, match=r"a\.bin is damaged"):
        check_file(listed, tmp_path, "a.bin", verify=True)


@pytest.mark.parametrize(
    "files", [[], None, "a.bin", {"a.bin": {}}, {"a.bin": None}, {"a.bin": []}, {"a.bin": {"bytes": 2}}]
)
def test_damaged_list_of_files_raises(tmp_path, files):
    (tmp_path / "a.bin").write_bytes(b"12")
    with pytest.raises(CacheError):
        check_file({"files": files}, tmp_path, "a.bin", verify=True)


def test_a_file_that_cannot_be_read_is_not_called_missing(tmp_path, monkeypatch):
    def refuse(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with pytest.raises(CacheError, match="is missing"):
        check_listed(tmp_path / "shard", {"bytes": 1})
    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(CacheError, match=r"cannot read .*shard: Permission denied") as error:
        check_listed(tmp_path / "shard", {"bytes": 1})
    assert isinstance(error.value.__cause__, PermissionError)
