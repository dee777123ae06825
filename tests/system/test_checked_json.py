"""JSON files with a checksum: what is read back, and which damage is found."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.system.checked_json import FIELD, DamagedJSON, parse_checked_json, read_checked_json, write_checked_json

VALUE = {"step": 40, "shares": {"wiki": 0.25, "notes": 0.75}, "names": ["a", "ü"], "none": None, "tuple": (1, 2)}


def test_an_object_comes_back_without_its_checksum(tmp_path):
    write_checked_json(tmp_path / "meta.json", VALUE)
    assert read_checked_json(tmp_path / "meta.json") == {**VALUE, "tuple": [1, 2]}
    stored = json.loads((tmp_path / "meta.json").read_text(encoding="utf-8"))
    assert stored[FIELD].startswith("sha256:") and {**stored, "tuple": (1, 2)} == {**VALUE, FIELD: stored[FIELD]}


def test_every_bit_flip_is_found_or_changes_nothing(tmp_path):
    write_checked_json(tmp_path / "meta.json", VALUE)
    data = (tmp_path / "meta.json").read_bytes()
    expected = parse_checked_json(data)
    found = 0
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            read = parse_checked_json(bytes(flipped))
        except DamagedJSON:
            found += 1
            continue
        # What remains: white space, and the name of the field itself.
        assert {key: value for key, value in read.items() if key in expected} == expected
    assert found > 0.9 * 8 * len(data)


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.floats(allow_nan=False) | st.text()))
def test_any_object_comes_back(value):
    value.pop(FIELD, None)
    from niels_gpt.system.checked_json import checksum

    text = json.dumps({**value, FIELD: checksum(value)})
    assert parse_checked_json(text.encode()) == value


def test_a_file_without_a_checksum_is_read_as_it_is():
    assert parse_checked_json(b'{"a": 1}') == {"a": 1}


@pytest.mark.parametrize("data", [b"", b"[1]", b"\xff", b'{"a": 1, "checksum": "sha256:0"}', b"[" * 100_000])
def test_damage_is_one_error(data):
    with pytest.raises(DamagedJSON):
        parse_checked_json(data)
