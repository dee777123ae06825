"""Rows of JSON files: formats, sizes, line numbers of damage, zips, and a seeded shuffle."""

import gzip
import json
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.data.reading import json_rows
from niels_gpt.data.reading.json_rows import iter_json_rows, shuffled_rows, without_export_extras
from niels_gpt.system import json_text


def read(*paths, **options):
    return [row for _, row in iter_json_rows(paths, **options)]


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
    return path


ROWS = [{"a": 1}, {"a": [{"b": "ü 😀 } ] {"}]}, {}, {"a": None, "c": "line\nend"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps(ROWS)),
        ("a.json", "\ufeff" + json.dumps(ROWS, indent=2, ensure_ascii=False)),
        ("a.json", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("a.json", "\r\n".join(json.dumps(row, indent=1) for row in ROWS)),
        ("a.jsonl", "\ufeff" + "\r\n\r\n".join(map(json.dumps, ROWS))),
        ("a.jsonl", json.dumps(ROWS, indent=2)),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("A.JSONL", "\n".join(map(json.dumps, ROWS))),
    ],
)
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_the_forms_of_a_file(tmp_path, monkeypatch, name, text, chunk):
    monkeypatch.setattr(json_rows, "_CHUNK", chunk)
    assert read(write(tmp_path / name, text)) == ROWS


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=3), children, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), min_size=1, max_size=6), st.booleans())
def test_rows_equal_those_of_json_loads(tmp_path_factory, rows, is_ascii):
    path = tmp_path_factory.mktemp("rows") / "a.json"
    write(path, json.dumps(rows, ensure_ascii=is_ascii))
    assert read(path) == json.loads(path.read_bytes())


def test_row_numbers_continue_over_files(tmp_path):
    paths = [write(tmp_path / f"{i}.jsonl", '{"a": 1}\n' * 3) for i in range(2)]
    assert [number for number, _ in iter_json_rows(paths)] == list(range(6))


def test_a_row_larger_than_a_chunk_is_not_parsed_once_per_chunk(tmp_path, monkeypatch):
    calls = []
    parse = json_rows._parse
    monkeypatch.setattr(json_rows, "_parse", lambda text, at: calls.append(at) or parse(text, at))
    monkeypatch.setattr(json_rows, "_CHUNK", 100)
    path = write(tmp_path / "a.json", json.dumps([{"a": "x" * 100_000}]))
    assert len(read(path)) == 1
    assert len(calls) < 15


DEEP = '{"a":' * 100_000


@pytest.mark.parametrize(
    ("name", "data", "fact"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": \n', "line 3 is not JSON"),
        ("a.jsonl", '{"a": 1}\nnull\n', "line 2 is not a JSON object"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', r"line 2 is not utf-8 \(byte 7"),
        ("a.jsonl", DEEP, "line 1 .*nested too deeply"),
        ("a.json", DEEP, "line 1 .*nested too deeply"),
        ("a.json", '[{"a": 1},\n {"a": 2},\n {"a" 3}]', "line 3 is not JSON"),
        ("a.json", '[{"a": 1},\n {"a": 2}', "truncated"),
        ("a.json", '[{"a": 1},\n {"a": 2', "line 2 is not JSON"),
        ("a.json", '[{"a": 1},\n [2]]', "line 2 is not a JSON object"),
        ("a.json", b'[{"a": 1},\n\n {"a": "\xe9"}]', "line 3 is not utf-8"),
        ("a.json", '{"a": ' + "1" * 5000 + "}", "line 1 is not JSON"),
        ("a.json", "[]", "no rows"),
        ("a.jsonl", " \n", "no rows"),
        ("a.jsonl.gz", b"no gzip", "gzip"),
        ("a.json.gz", gzip.compress(b'[{"a": 1}' * 999, mtime=0)[:-9], "gzip"),
    ],
)
def test_damage_is_named_with_the_line(tmp_path, name, data, fact):
    path = write(tmp_path / name, data)
    with pytest.raises(ValueError, match=f"{path}.*{fact}"):
        read(path)


def test_bytes_that_are_not_utf8_can_be_replaced(tmp_path):
    for name in ("a.json", "a.jsonl"):
        assert read(write(tmp_path / name, b'{"a": "caf\xe9"}'), errors="replace") == [{"a": "caf\ufffd"}]


def test_rows_are_shuffled_in_blocks(tmp_path, monkeypatch):
    path = write(tmp_path / "a.jsonl", "".join(f'{{"a": {i}}}\n' for i in range(50)))
    orders = []
    for block in (7, 1000):
        monkeypatch.setattr(json_rows, "SHUFFLED_ROWS", block)
        orders.append(list(shuffled_rows(lambda: iter_json_rows([path]), 3)))
    assert orders[0] == orders[1] != list(shuffled_rows(lambda: iter_json_rows([path]), 4))
    assert sorted(number for number, _ in orders[0]) == list(range(50))
    assert all(row == {"a": number} for number, row in orders[0])


def test_only_the_conversations_of_an_export(tmp_path):
    names = ["conversations.json", "more.json", "user.json"]
    paths = [str(write(tmp_path / name, "[]")) for name in names]
    assert without_export_extras(paths) == paths[:1]
    (tmp_path / "user.json").unlink()
    assert without_export_extras(paths[:2]) == paths[:2]  # not an export: nothing is skipped


# --- zips --------------------------------------------------------------------------------------------


def make_zip(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name.replace("__", "."), text)
    return path


def test_a_zip_that_is_not_an_export(tmp_path):
    with pytest.raises(ValueError, match=r"a\.zip.*conversations\.json.*unpack"):
        read(make_zip(tmp_path / "a.zip", notes__md="x"))
    with pytest.raises(ValueError, match=r"b\.zip.*damaged"):
        read(write(tmp_path / "b.zip", b"PK no zip"))


def test_damage_within_a_zip(tmp_path, monkeypatch):
    path = make_zip(tmp_path / "a.zip", conversations__json='[{"a": "' + "xyz" * 500 + '"}]')
    assert len(read(path)) == 1
    data = bytearray(path.read_bytes())
    data[60] ^= 0xFF
    with pytest.raises(ValueError, match=r"b\.zip.*damaged"):
        read(write(tmp_path / "b.zip", bytes(data)))
    monkeypatch.setattr(json_rows, "MOST_ZIP_BYTES", 1000)
    with pytest.raises(ValueError, match=r"a\.zip.*conversations\.json.*1,511.*1,000"):
        read(path)


def test_an_encrypted_zip(tmp_path):
    path = make_zip(tmp_path / "a.zip", conversations__json="[{}]")
    data = bytearray(path.read_bytes())
    data[6] |= 1  # the flag in the local header, and in the central directory
    data[data.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(ValueError, match=r"a\.zip.*encrypted.*unpack"):
        read(write(path, bytes(data)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_a_row_may_be_nested_only_as_deeply_as_all_code_can_walk(tmp_path, name, opening, closing):
    """900 levels can be parsed but not written again."""
    for depth in (json_text.DEEPEST - 1, json_text.DEEPEST, 900):
        path = tmp_path / name
        path.write_text('{"x": ' + opening * depth + "1" + closing * depth + "}", encoding="utf-8")
        if depth < json_text.DEEPEST:
            ((_, row),) = iter_json_rows([path])
            assert json.loads(path.read_text(encoding="utf-8")) == row
        else:
            with pytest.raises(ValueError, match="line 1 is nested too deeply"):
                list(iter_json_rows([path]))
