"""Damaged files: the message names the file and the line."""

import functools
import gzip
import io
import json
import logging
import random
import time

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.data.fineweb_edu import iter_fineweb_edu
from niels_gpt.data.reading.diagnose import check_json_start, explain

LINE = '{"text": "a good row", "id": 1}\n'
GOOD = LINE * 20


@functools.cache
def parquet_bytes():
    noise = random.Random(0)
    texts = ["".join(noise.choices("abcdefgh ", k=50)) for _ in range(4000)]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)
    return file.getvalue()


@functools.cache
def noise_lines(n):
    noise = random.Random(0)
    return "".join(json.dumps({"text": "".join(noise.choices("abcdefgh ", k=400))}) + "\n" for _ in range(n)).encode()


def cut_gzip():
    return gzip.compress(noise_lines(1000))[:-5000]


def gzip_without_its_end():
    return gzip.compress(GOOD.encode("utf-8"))[:-4]


def gzip_with_another_sum():
    data = gzip.compress(GOOD.encode("utf-8"))
    return data[:-8] + b"\x00\x01\x02\x03" + data[-4:]


def gzip_damaged_inside():
    data = bytearray(gzip.compress(noise_lines(1000)))
    data[len(data) // 2 : len(data) // 2 + 200] = b"\xff" * 200
    return bytes(data)


def cut_parquet():
    data = parquet_bytes()
    return data[: len(data) // 2]


def damaged_parquet():
    data = parquet_bytes()
    return data[:4] + b"\xff" * 2000 + data[2004:]


# name -> (file name, its content, facts of the message)
DAMAGE = {
    "cut gzip": ("train.jsonl.gz", cut_gzip, ["gzip", "after line"]),
    "gzip without its end": ("train.jsonl.gz", gzip_without_its_end, ["gzip", "after line 20"]),
    "gzip with another sum": ("train.jsonl.gz", gzip_with_another_sum, ["gzip"]),
    "gzip damaged inside": ("train.jsonl.gz", gzip_damaged_inside, ["gzip"]),
    "text as gzip": ("train.jsonl.gz", lambda: GOOD.encode("utf-8"), ["gzip"]),
    "text as parquet": ("train.parquet", lambda: b"some text\n" * 20, ["parquet"]),
    "short text as parquet": ("train.parquet", lambda: b"no", ["parquet"]),
    "cut parquet": ("train.parquet", cut_parquet, ["parquet"]),
    "damaged parquet": ("train.parquet", damaged_parquet, ["parquet"]),
    "bad line": ("train.jsonl", lambda: (GOOD + '{"text": "cut sho\n' + GOOD).encode("utf-8"), ["line 21", "JSON"]),
    "bad first line": ("train.jsonl", lambda: ("no json\n" + GOOD).encode("utf-8"), ["line 1 ", "JSON"]),
    "bad last line": ("train.jsonl", lambda: (GOOD + '{"text": "cut').encode("utf-8"), ["line 21", "JSON"]),
    "bad line after blank ones": (
        "train.jsonl",
        lambda: (GOOD + "\n\n" + "]\n").encode("utf-8"),
        ["line 23", "JSON"],
    ),
    "bad line in a gzip": (
        "train.jsonl.gz",
        lambda: gzip.compress((GOOD + "{no\n").encode("utf-8")),
        ["line 21", "JSON"],
    ),
    "not utf-8": ("train.jsonl", lambda: (GOOD + '{"text": "café"}\n').encode("latin-1"), ["line 21", "utf-8"]),
    "text not utf-8": ("train.txt", lambda: "one\ntwo\ncafé\n".encode("latin-1"), ["line 3", "utf-8"]),
    "utf-16": ("train.txt", lambda: "words\n".encode("utf-16"), ["line 1 ", "utf-8"]),
    "lone surrogate": ("train.jsonl", lambda: (GOOD + '{"text": "a\\ud800b"}\n').encode(), ["line 21", "surrogate"]),
    "lone surrogate in a key": (
        "train.jsonl",
        lambda: (GOOD + '{"\\udfff": 1}\n').encode(),
        ["line 21", "surrogate"],
    ),
    "empty jsonl": ("train.jsonl", lambda: b"", ["empty"]),
    "empty parquet": ("train.parquet", lambda: b"", ["empty"]),
    "empty gzip file": ("train.jsonl.gz", lambda: b"", ["empty"]),
    "gzip of nothing": ("train.jsonl.gz", lambda: gzip.compress(b""), ["no line"]),
}


def write_damaged(folder, key):
    """Return (a damaged file, facts of the message)."""
    name, make, parts = DAMAGE[key]
    (folder / name).write_bytes(make())
    return folder / name, parts


@pytest.mark.parametrize("key", DAMAGE)
def test_the_message_for_a_file(tmp_path, key):
    file, parts = write_damaged(tmp_path, key)
    for name in (file, str(file)):
        message = explain([name])
        assert message.startswith(f"cannot read {file}: ")
        assert "\n" not in message
        for part in parts:
            assert part in message.replace(str(file), "")


@pytest.mark.parametrize(
    ("key", "streaming", "shuffle"),
    [
        ("cut gzip", True, False),
        ("gzip with another sum", False, True),
        ("gzip damaged inside", True, True),
        ("cut parquet", False, True),
        ("damaged parquet", True, False),
        ("bad line", True, True),
        ("not utf-8", False, False),
        ("lone surrogate", True, False),
        ("empty jsonl", False, True),
    ],
)
def test_a_loader_raises_it(tmp_path, monkeypatch, key, streaming, shuffle):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    file, _ = write_damaged(tmp_path, key)
    with pytest.raises(ValueError) as caught:
        list(iter_fineweb_edu(path=tmp_path, streaming=streaming, shuffle=shuffle))
    assert str(caught.value) == explain([file])
    assert not [pause for pause in pauses if pause < 5]  # `datasets` itself waits 5 s after a parquet stream


def test_good_files_have_no_problem(tmp_path):
    (tmp_path / "a.jsonl").write_text(GOOD, encoding="utf-8")
    (tmp_path / "blank.jsonl").write_text(f"\n{LINE}\n  \n{LINE}\r\n", encoding="utf-8")
    (tmp_path / "no end.jsonl").write_text(LINE.strip(), encoding="utf-8")
    (tmp_path / "pair.jsonl").write_text('{"text": "\\ud83d\\ude00 é 😀"}\n', encoding="utf-8")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(GOOD.encode("utf-8")))
    (tmp_path / "c.txt").write_text("no json\n{", encoding="utf-8")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"no json"))
    (tmp_path / "e.parquet").write_bytes(parquet_bytes())
    (tmp_path / "f.json").write_text(json.dumps([{"text": "a"}], indent=1), encoding="utf-8")
    files = sorted(tmp_path.iterdir())
    assert len(files) == 9
    assert [explain([file]) for file in files] == [None] * 9
    assert explain(files) is None
    assert explain([]) is None


def test_the_first_bad_file_is_named(tmp_path):
    names = [tmp_path / f"train-{i}.jsonl" for i in range(4)]
    for file, content in zip(names, (GOOD, GOOD, "{\n", ""), strict=True):
        file.write_text(content, encoding="utf-8")
    assert str(names[2]) in explain(names)
    assert str(names[3]) in explain(reversed(names))


@pytest.mark.parametrize("streaming", [True, False])
def test_files_of_other_splits_are_not_read(tmp_path, streaming):
    (tmp_path / "test.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "train-0.jsonl").write_text(GOOD, encoding="utf-8")
    assert len(list(iter_fineweb_edu(path=tmp_path, streaming=streaming))) == 20
    (tmp_path / "train-1.jsonl").write_text(GOOD + "{no\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 21 .*JSON") as caught:
        list(iter_fineweb_edu(path=tmp_path, streaming=streaming))
    assert str(tmp_path / "train-1.jsonl") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "streaming"),
    [
        ("rows.json", '[{"text": "a"}, {"te', True),
        ("rows.jsonl", "[1, 2]\n[3]\n", False),
        ("rows.parquet.gz", "what is this", False),
    ],
)
def test_other_unreadable_files_are_named(tmp_path, streaming, name, content):
    file = tmp_path / name
    file.write_text(content, encoding="utf-8")
    with pytest.raises(Exception) as caught:
        list(iter_fineweb_edu(path=file, streaming=streaming))
    assert isinstance(caught.value, ValueError), repr(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("start", "line"),
    [(b"null\n", 1), (b"\n\n null\n", 3), (b"\xef\xbb\xbf5\n", 1), (b" " * 4095 + b"n", 1), (b'"a"', 1)],
)
def test_a_file_that_does_not_begin_with_an_object_is_an_error(tmp_path, start, line):
    """pyarrow 26 crashes with a segmentation fault if the first line of a JSON file is null."""
    for path, data in ((tmp_path / "a.jsonl", start), (tmp_path / "b.jsonl.gz", gzip.compress(start))):
        path.write_bytes(data)
        with pytest.raises(ValueError) as caught:
            check_json_start([path])
        assert str(path) in str(caught.value) and f"line {line} " in str(caught.value)
    with pytest.raises(ValueError, match=r"a\.jsonl"):
        list(iter_fineweb_edu(path=tmp_path / "a.jsonl"))


def test_files_that_pass_the_check_of_the_start(tmp_path):
    contents = {
        "object.jsonl": b'\n {"text": 1}',
        "list.jsonl": b"[1]",
        "bom.jsonl": b"\xef\xbb\xbf{}",
        "empty.jsonl": b"",
        "late.jsonl": b" " * 4096 + b"null",  # only the first 4096 bytes are read
        "damaged.jsonl.gz": b"not gzip",
        "text.txt": b"null",
    }
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    check_json_start(tmp_path / name for name in contents)


def test_rows_before_the_damage_are_yielded(tmp_path):
    # 12 MB of valid rows: `datasets` reads 10 MB at a time.
    good = json.dumps({"text": "x" * 9_990}) + "\n"
    (tmp_path / "train.jsonl").write_text(good * 1200 + "{no\n", encoding="utf-8")
    found = []
    with pytest.raises(ValueError, match=r"train\.jsonl: line 1201 "):
        for sample in iter_fineweb_edu(path=tmp_path, shuffle=False):
            found.append(len(sample.text))
    assert set(found) == {9_990} and 500 < len(found) <= 1200


def test_datasets_does_not_log_the_error_again(tmp_path):
    (tmp_path / "train.jsonl").write_text(GOOD + "{no\n", encoding="utf-8")
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("datasets")
    logger.addHandler(handler)
    try:
        with pytest.raises(ValueError, match="line 21"):
            list(iter_fineweb_edu(path=tmp_path))
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


@settings(max_examples=40)
@given(
    lines=st.lists(st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text(max_size=9)))),
    where=st.integers(0, 10),
    bad=st.sampled_from([(b"{", "JSON"), (b'{"a": 1} x', "JSON"), (b'"\\ud800"', "surrogate"), (b'"\xff"', "utf-8")]),
    packed=st.booleans(),
)
def test_the_bad_line_is_named(tmp_path_factory, lines, where, bad, packed):
    content, kind = bad
    encoded = [json.dumps(line).encode("utf-8") for line in lines]
    where = min(where, len(encoded))
    data = b"".join(line + b"\n" for line in [*encoded[:where], content, *encoded[where:]])
    file = tmp_path_factory.mktemp("bad") / ("rows.jsonl.gz" if packed else "rows.jsonl")
    file.write_bytes(gzip.compress(data) if packed else data)
    assert f"line {where + 1} " in explain([file])
    assert kind in explain([file])
