import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.cache.meta import CacheError, check_file, check_meta, find_meta, read_meta, sha256_file, write_meta
from tests.cache import no_waiting

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
METAS = st.dictionaries(st.text(max_size=5).filter(lambda key: key != "format_version"), JSON, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def quick():
    with no_waiting():
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("meta") / "meta.json"


# --- meta.json ---------------------------------------------------------------------------------------


@given(meta=METAS)
def test_what_is_written_is_read(place, meta):
    write_meta(str(place), meta)
    assert read_meta(str(place)) == meta
    assert [path.name for path in place.parent.iterdir()] == ["meta.json"]


@given(meta=METAS)
def test_the_same_content_gives_the_same_bytes(place, meta):
    write_meta(place, meta)
    first = place.read_bytes()
    write_meta(place, dict(reversed(meta.items())))
    assert place.read_bytes() == first


def test_it_is_json_that_a_person_can_read(tmp_path):
    write_meta(tmp_path / "meta.json", {"b": 1, "a": "é"})
    assert (tmp_path / "meta.json").read_text(encoding="utf-8") == '{\n  "a": "é",\n  "b": 1\n}\n'


def test_a_write_that_fails_leaves_the_old_one(tmp_path):
    write_meta(tmp_path / "meta.json", {"a": 1})
    with pytest.raises(TypeError):
        write_meta(tmp_path / "meta.json", {"a": object()})
    assert read_meta(tmp_path / "meta.json") == {"a": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_one_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(CacheError, match=r"no .*meta\.json.*build") as error:
        read_meta(tmp_path / "meta.json")
    assert isinstance(error.value, ValueError)
    assert find_meta(tmp_path) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"a": 1', b"\xff\xfe{}", b"[]", b"3", b'"x"', b"null", b"{} {}", b"[" * 10**5]
)
def test_a_damaged_one_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "meta.json").write_bytes(content)
    for read in (lambda: read_meta(tmp_path / "meta.json"), lambda: find_meta(tmp_path)):
        with pytest.raises(CacheError, match=r"meta\.json is damaged"):
            read()


def test_a_folder_in_its_place_is_an_error(tmp_path):
    (tmp_path / "meta.json").mkdir()
    with pytest.raises(CacheError, match="damaged"):
        read_meta(tmp_path / "meta.json")


@pytest.mark.parametrize("version", [2, 1000, "1", None, 1.5, [1]])
def test_a_format_that_is_not_known_is_refused(tmp_path, version):
    (tmp_path / "meta.json").write_text(json.dumps({"format_version": version}), encoding="utf-8")
    with pytest.raises(CacheError, match="format version"):
        read_meta(tmp_path / "meta.json")


@pytest.mark.parametrize("meta", [{}, {"format_version": 1}])
def test_a_known_format_is_read(tmp_path, meta):
    write_meta(tmp_path / "meta.json", meta)
    assert read_meta(tmp_path / "meta.json") == find_meta(tmp_path) == meta


# --- hashes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 65_536, 3_000_001])
def test_sha256_of_a_file(tmp_path, size):
    data = bytes(i * i % 251 for i in range(1000)) * (size // 1000 + 1)
    (tmp_path / "x").write_bytes(data[:size])
    assert sha256_file(str(tmp_path / "x")) == hashlib.sha256(data[:size]).hexdigest()


def test_sha256_golden(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert sha256_file(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


# --- does a cache fit its reader? ----------------------------------------------------------------------


def test_a_cache_that_fits(tmp_path):
    for meta in ({}, {"token_dtype": "uint16-le", "tokenizer_sha256": "ab"}, {"built": True}):
        check_meta(meta, tmp_path, tokenizer_sha256=None)
    check_meta({"tokenizer_sha256": "ab"}, tmp_path, tokenizer_sha256="ab")


@pytest.mark.parametrize(
    ("meta", "wanted"),
    [
        ({"token_dtype": "uint32-le"}, "uint32-le"),
        ({"token_dtype": "uint16-be"}, "uint16-be"),
        ({"token_dtype": None}, "None"),
        ({"built": False, "reason": "no source was given"}, "was not built: no source was given"),
        ({"built": False}, "was not built"),
        ({"tokenizer_sha256": "cd" * 32}, "another tokenizer.*cdcdcd.*abab"),
        ({"tokenizer_sha256": None}, "another tokenizer"),
        ({}, "another tokenizer"),
    ],
)
def test_a_cache_that_does_not_fit_says_which_and_why(tmp_path, meta, wanted):
    with pytest.raises(CacheError, match=wanted) as error:
        check_meta(meta, tmp_path / "the cache", tokenizer_sha256="ab" * 32)
    assert "the cache" in str(error.value)


@pytest.fixture
def listed(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"12")
    return {"files": {"a.bin": {"bytes": 2, "sha256": hashlib.sha256(b"12").hexdigest()}}}


def test_a_file_as_listed(tmp_path, listed):
    check_file(listed, tmp_path, "a.bin")
    check_file(listed, tmp_path, "a.bin", verify=True)
    check_file({}, tmp_path, "a.bin", verify=True)  # a meta without a list says nothing about files


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_is_missing_or_not_listed(tmp_path, listed, verify):
    (tmp_path / "b.bin").write_bytes(b"34")
    with pytest.raises(CacheError, match=r"b\.bin is not in"):
        check_file(listed, tmp_path, "b.bin", verify=verify)
    with pytest.raises(CacheError, match=r"c\.bin is missing"):
        check_file(listed, tmp_path, "c.bin", verify=verify)
    (tmp_path / "a.bin").unlink()
    (tmp_path / "a.bin").mkdir()
    with pytest.raises(CacheError, match=r"a\.bin is missing"):
        check_file(listed, tmp_path, "a.bin", verify=verify)


@pytest.mark.parametrize("data", [b"", b"1", b"123"])
def test_a_file_of_another_size(tmp_path, listed, data):
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(CacheError, match=rf"a\.bin has {len(data)} bytes, but meta\.json says 2"):
        check_file(listed, tmp_path, "a.bin")


def test_a_changed_file_is_found_when_it_is_verified(tmp_path, listed):
    (tmp_path / "a.bin").write_bytes(b"13")
    check_file(listed, tmp_path, "a.bin")
    with pytest.raises(CacheError, match=r"a\.bin is damaged"):
        check_file(listed, tmp_path, "a.bin", verify=True)


@pytest.mark.parametrize(
    "files", [[], None, "a.bin", {"a.bin": {}}, {"a.bin": None}, {"a.bin": []}, {"a.bin": {"bytes": 2}}]
)
def test_a_damaged_list_of_files_is_refused_and_no_crash(tmp_path, files):
    (tmp_path / "a.bin").write_bytes(b"12")
    with pytest.raises(CacheError):
        check_file({"files": files}, tmp_path, "a.bin", verify=True)
