"""Lines of metrics.jsonl: checksums, damage, and lines of older versions."""

import json
import warnings

import pytest

from niels_gpt.runs.metrics import encode_line, parse_line, read_metrics, warn_of_damage
from tests.faults import flipped

LINES = [
    {"step": step, "loss": 5.5 / (step + 1), "lr": 3e-4, "tokens_per_s": 1234.5}
    | ({"evals": {"val_roam": 2.25 + step, "blanks \t ": 1.0}} if step % 3 == 0 else {})
    for step in range(10)
]


@pytest.fixture
def path(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(map(encode_line, LINES)))
    return tmp_path / "metrics.jsonl"


def test_lines_are_json_and_round_trip(path):
    assert read_metrics(path) == (LINES, [], False)
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == LINES
    evaluated = read_metrics(path, containing=b'"evals"')
    assert evaluated == ([line for line in LINES if "evals" in line], [], False)
    assert read_metrics(path.with_name("none")) == ([], [], False)


def test_lines_of_older_versions_are_accepted(path):
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES), encoding="utf-8")
    assert read_metrics(path) == (LINES, [], False)


@pytest.mark.parametrize("containing", [b"", b'"evals"'])
def test_a_flipped_bit_is_reported_or_changes_nothing(path, containing):
    data, intact = path.read_bytes(), read_metrics(path, containing=containing)
    for damaged in flipped(data, count=400):
        path.write_bytes(damaged)
        found = read_metrics(path, containing=containing)
        if found.damaged or found.torn:
            assert all(line in LINES for line in found.lines)
        else:
            assert found == intact


def test_damage_is_counted_in_one_warning(path):
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"5.5", b"1.5").replace(b"1.83", b"1.03")
    lines[5] = b"\0" * 20 + b"\n"
    path.write_bytes(b"".join(lines)[:-9])
    found = read_metrics(path)
    assert found == ([LINES[i] for i in (0, 1, 3, 4, 6, 7, 8)], [3, 6], True)
    with pytest.warns(
        UserWarning, match=r"metrics\.jsonl has 2 damaged lines \(line 3, 6\) and an incomplete last"
    ) as w:
        warn_of_damage(path, found)
    assert len(w) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_damage(path, read_metrics(path.with_name("none")))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"5",
        b'{"step": 1, "loss": 1.0}  ',
        b'{"step": 1, "evals": []}',
        b'{"step": 1, "lr": "x"}',
        b"[" * 9999,
    ],
)
def test_what_is_not_the_line_of_a_step(text):
    assert parse_line(text) is None


def test_golden_line():
    """The CRC-32 computed bit by bit, with the polynomial of zlib."""
    text = b'{"step": 0, "loss": 2.5}'
    crc = 0xFFFFFFFF
    for byte in text:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0xEDB88320 * (crc & 1)
    blanks = "".join("\t" if (crc ^ 0xFFFFFFFF) >> bit & 1 else " " for bit in range(31, -1, -1))
    assert encode_line({"step": 0, "loss": 2.5}) == text + blanks.encode() + b"\n"
