"""The report dict against loops over windows and characters."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.memorization.measure import Document, ExtractionSettings, Measurement, measure, position_map
from niels_gpt.memorization.summary import build_report, character_map, curve_entry, document_row, strip, top_passages
from niels_gpt.tokenizer import ByteTokenizer
from tests.memorization.models import (
    TableTokenizer,
    full_report,
    letters,
    measured,
    measurement,
    run_of,
    some_ids,
    some_model,
    taught_model,
)

LEVELS = {"0.0001": 1e-4, "0.01": 0.01, "0.1": 0.1, "0.5": 0.5, "0.9": 0.9}


def naive_map(one: Measurement, pieces: list[bytes], end: int, whole: bool) -> tuple[str, list[float]]:
    """Go character by character: its bytes, the tokens of these, the windows that cover the tokens."""
    owners = [i for i, t in enumerate(one.document.ids.tolist()) if t != end for _ in pieces[t]]
    text = b"".join(pieces[t] for t in one.document.ids.tolist() if t != end).decode()
    values, at = [], 0
    for character in text:
        tokens = owners[at : at + len(character.encode())]
        at += len(character.encode())
        best = 0.0
        spans = zip(one.starts.tolist(), one.cuts.tolist(), one.ends.tolist(), one.log_p.tolist(), strict=True)
        for start, cut, end, log_p in spans:
            if any((start if whole else cut) <= token < end for token in tokens):
                best = max(best, math.exp(log_p))
        values.append(best)
    return text, values


@settings(max_examples=40)
@given(
    text=st.text(st.sampled_from("aé漢😀b \n"), min_size=3, max_size=40),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=200),
    stride=st.integers(1, 4),
    whole=st.booleans(),
    seed=st.integers(0, 99),
)
def test_map_with_characters_cut_by_tokens(text: str, cuts: list[int], stride: int, whole: bool, seed: int) -> None:
    data, pieces = text.encode(), []
    while data:
        n = cuts[len(pieces) % len(cuts)]
        pieces.append(data[:n])
        data = data[n:]
    ids = np.append(np.arange(len(pieces)), len(pieces))  # and EOT
    chosen = ExtractionSettings(window=4, prompt=2, stride=stride, whole_window=whole)
    starts = sorted({*range(0, len(ids) - 4 + 1, stride), max(0, len(ids) - 4)})
    draw = random.Random(seed)
    log_p = [draw.uniform(-5, 0) for _ in starts]
    width = min(4, len(ids))
    one = measurement(ids, starts, log_p, settings=chosen, window=width, prompt=min(2, width - 1))
    found_text, found = character_map(one, TableTokenizer(pieces))
    expected_text, expected = naive_map(one, pieces, len(pieces), whole)
    assert found_text == expected_text == text
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_map_of_invalid_utf8() -> None:
    """Every invalid byte is a separate U+FFFD with its own P(z)."""
    data = b"ab\xe6\xbcc\xf0\x9f\xff"
    options = {"settings": ExtractionSettings(4, 1, 3), "window": 4, "prompt": 1}
    one = measurement(np.frombuffer(data, np.uint8), [0, 3, 4], [-3.0, -2.0, -1.0], **options)
    text, found = character_map(one, ByteTokenizer())
    assert text == "ab\ufffd\ufffdc\ufffd\ufffd\ufffd"
    assert found.tolist() == pytest.approx([0, *np.exp([-3, -3, -3, -2, -1, -1, -1])])


def test_strips_have_four_digits() -> None:
    one = measurement(np.arange(12), [0], [math.log(0.123456789)])
    found = strip(one, letters())
    assert found == {"document": "a", "control": False, "text": "abcdefghijkl", "p": [0.0] * 5 + [0.1235] * 7}


@pytest.mark.parametrize("index", range(4))
def test_row_of_a_document(index: int) -> None:
    one, row = measured()[index], full_report()["documents"][index]
    p = sorted(math.exp(value) for value in one.log_p.tolist())
    n = len(p)
    assert row["name"] == one.document.name and row["source"] == one.document.source
    assert row["control"] is one.document.control and row["short"] is (index == 3)
    assert (row["tokens"], row["windows"]) == (len(one.document.ids), n)
    assert row["bytes"] == sum(len(letters().token_bytes[i]) for i in one.document.ids.tolist() if i != 39)  # not EOT
    assert row["mean_p"] == pytest.approx(math.fsum(p) / n)
    assert row["median_p"] == pytest.approx((p[(n - 1) // 2] + p[n // 2]) / 2)
    assert row["max_p"] == pytest.approx(p[-1])
    assert row["mean_log_p"] == pytest.approx(math.fsum(one.log_p.tolist()) / n)
    assert row["over"] == {key: sum(value >= level for value in p) for key, level in LEVELS.items()}
    for n_samples, counts in row["discoverable"].items():
        for key, count in counts.items():
            expected = sum(1 - (1 - value) ** int(n_samples) >= float(key) for value in p if value > 1e-12)
            assert count == expected
    shares = one.greedy_share.tolist()
    assert row["greedy"] == {
        "starts": len(shares),
        "share": pytest.approx(math.fsum(shares) / len(shares)),
        "exact": shares.count(1.0),
    }
    run = row["longest_run"]
    ids = one.document.ids.tolist()[run["start"] : run["start"] + run["tokens"]]
    assert run["tokens"] == one.longest[0]
    assert run["text"] == b"".join(letters().token_bytes[i] for i in ids if i != 39).decode()


def test_values_at_a_level_count() -> None:
    row = document_row(measurement(np.arange(20), [0, 3, 6], [0.0, -2000.0, math.log(0.25)]), letters())
    assert row["over"] == {"0.0001": 2, "0.01": 2, "0.1": 2, "0.5": 1, "0.9": 1}
    assert list(row["discoverable"]) == ["1", "10", "100", "1000", "10000", "100000", "1000000"]
    assert row["discoverable"]["1"] == {"0.1": 2, "0.5": 1, "0.9": 1}
    assert row["discoverable"]["10"] == {"0.1": 2, "0.5": 2, "0.9": 2}  # 1 - 0.75**10 = 0.94
    assert row["mean_log_p"] == pytest.approx((math.log(0.25) - 2000) / 3)
    assert row["greedy"] == {"starts": 0, "share": None, "exact": 0}
    assert row["longest_run"] == {"tokens": 0, "start": 0, "text": ""}


@settings(max_examples=40)
@given(seed=st.integers(0, 999), most=st.integers(0, 12), least=st.sampled_from([0.0, 0.01, 0.3]))
def test_passages_against_a_loop(seed: int, most: int, least: float) -> None:
    draw = random.Random(seed)
    documents = []
    for name in "abc":
        starts = sorted(draw.sample(range(60), draw.randint(1, 12)))
        log_p = [draw.choice([0.0, -0.5, -3.0, -800.0, -900.0]) + draw.uniform(-0.01, 0) for _ in starts]
        documents.append(
            measurement(some_ids(80, V=39, seed=ord(name) + 1000 * seed), starts, log_p, name=name, control=name == "c")
        )
    found = top_passages(documents, letters(), most=most, least=least)
    windows = [(v, one.document.name, s) for one in documents for v, s in zip(one.log_p, one.starts, strict=True)]
    expected: list[tuple] = []
    for value, name, start in sorted(windows, key=lambda window: -window[0]):
        free = all(
            not set(range(start + 5, start + 12)) & set(range(s + 5, s + 12)) for _, n, s in expected if n == name
        )
        if free and len(expected) < most and math.exp(value) >= least:
            expected.append((value, name, start))
    assert [(p["log_p"], p["document"], p["start"]) for p in found] == expected
    for passage in found:
        assert passage["end"] == passage["start"] + 12
        assert passage["p"] == pytest.approx(math.exp(passage["log_p"]))
        assert passage["control"] is (passage["document"] == "c")


def test_a_text_that_several_documents_have_is_listed_once() -> None:
    """Also if a window of another document has more or less of it; a suffix of spaces is only like another one."""
    texts = {"whole": "ab whole text", "same": "cd whole text", "part": "abc      text", "other": "ef other text"}
    texts |= {"spaces": "gh" + 11 * " ", "more spaces": "ij" + 11 * " "}
    documents = [
        measurement(np.array([*text.encode()]), [0], [-1.0 - i / 10], name=name, window=13, prompt=3)
        for i, (name, text) in enumerate(texts.items())
    ]
    for order, listed in ((documents, ["whole", "other", "spaces"]), (documents[1:], ["same", "other", "spaces"])):
        assert [p["document"] for p in top_passages(order, ByteTokenizer())] == listed
    assert [p["also_in"] for p in top_passages(documents, ByteTokenizer())] == [["same"], [], []]
    [part] = top_passages(documents[2:3] + documents[:2], ByteTokenizer(), most=1, least=0.3)
    assert (part["document"], part["also_in"]) == ("whole", ["same"])
    assert [p["document"] for p in top_passages(documents[::2], ByteTokenizer())] == ["whole", "spaces"]


def test_overlapping_windows_of_a_text_that_several_documents_have() -> None:
    """Neighbors of a window that is dropped are not listed in its place."""
    text = np.array([*b"the gardener waters every fern on mondays, and on fridays"])
    starts = [0, 5, 10, 15]
    documents = [
        measurement(
            text, starts, [-1.0 - abs(start - 10) - n / 10 for start in starts], name=name, window=40, prompt=20
        )
        for n, name in enumerate("abc")
    ]
    assert [(p["document"], p["start"]) for p in top_passages(documents, ByteTokenizer())] == [("a", 10)]


def test_text_of_a_passage() -> None:
    ids = np.array([*b"abc", *"é".encode(), *b"def", *"é".encode(), *b"g"])
    [found] = top_passages([measurement(ids, [0], [-1.0], window=11, prompt=4)], ByteTokenizer())
    assert (found["prompt"], found["suffix"]) == ("abc\ufffd", "\ufffddefé" + "g")
    [found] = top_passages([measurement(np.array([0, 1, 2, 39, 3, 39]), [0], [-1.0], window=6, prompt=4)], letters())
    assert (found["prompt"], found["suffix"]) == ("abc", "d")


def test_contents_of_a_report() -> None:
    found = full_report()
    model, _ = taught_model()
    assert list(found) == [
        "format", "title", "checkpoint", "base", "step", "parameters", "positions", "unit", "settings", "documents",
        "passages", "strips", "checkpoints", "position_map",
    ]  # fmt: skip
    assert (found["format"], found["title"], found["checkpoint"], found["step"]) == (
        2, "a title", "runs/x/step_60.pt", 60,
    )  # fmt: skip
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert (found["positions"], found["unit"], found["position_map"]) == ("rope", "token", None)
    assert found["settings"] == {"window": 12, "prompt": 5, "stride": 3, "greedy": 4, "map": "suffix"}
    assert list(found["documents"][0]) == [
        "name", "source", "control", "tokens", "bytes", "windows", "short", "mean_p", "median_p", "max_p",
        "mean_log_p", "over", "nats_per_token", "bits_per_byte", "greedy", "longest_run", "discoverable",
    ]  # fmt: skip
    assert [s["document"] for s in found["strips"]] == ["known", "with, errors", "control", "short"]
    assert all(len(s["p"]) == len(s["text"]) for s in found["strips"])
    assert [entry["step"] for entry in found["checkpoints"]] == [10, 20]
    assert found["passages"][0]["document"] != "control"


def test_curve_entry() -> None:
    entry = curve_entry(7, [measurement(np.arange(30), [0, 3, 6, 9], [0.0, math.log(0.5), -1.0, -4.0], control=True)])
    [found] = entry["documents"]
    p = [1.0, 0.5, math.exp(-1), math.exp(-4)]
    assert entry["step"] == 7
    assert found == {
        "name": "a",
        "control": True,
        "mean_p": pytest.approx(sum(p) / 4),
        "median_p": pytest.approx((p[1] + p[2]) / 2),
        "max_p": 1.0,
        "mean_log_p": pytest.approx((math.log(0.5) - 5) / 4),
        "memorized": 0.5,
        "nats_per_token": 2.0,
    }


def test_strips_of_the_documents_with_the_highest_p() -> None:
    model, _ = taught_model()
    documents = [measurement(np.arange(12), [0], [value], name=f"{value}") for value in (-3.0, -1.0, -4.0, -2.0)]
    found = build_report(run_of(model), documents, strips=2)
    assert [s["document"] for s in found["strips"]] == ["-1.0", "-2.0"]
    assert len(found["documents"]) == 4


def test_learned_positions_and_bytes() -> None:
    model = some_model(V=256, positions="learned")
    chosen = ExtractionSettings(window=12, prompt=5, greedy=0, whole_window=True)
    document = Document("a", np.frombuffer(b"hello world, hello", np.uint8))
    ones = measure(model, [document], ByteTokenizer(), chosen)
    found = build_report(run_of(model, ByteTokenizer()), ones, position_map=position_map(model, [document], chosen))
    assert (found["positions"], found["unit"], found["settings"]["map"]) == ("learned", "byte", "window")
    assert len(found["position_map"]["offsets"]) == 9
    assert found["strips"][0]["p"][0] > 0  # the whole window counts
    json.dumps(found, allow_nan=False)


def test_errors() -> None:
    model, _ = taught_model()
    with pytest.raises(ValueError, match="no document"):
        build_report(run_of(model), [])
    other = measurement(np.arange(12), [0], [-1.0], settings=ExtractionSettings(12, 6, 3, 4))
    with pytest.raises(ValueError, match="settings"):
        build_report(run_of(model), [*measured(), other])


def test_passages_at_the_least_probability_and_distance() -> None:
    """A window at `least` is listed; so is one exactly a suffix (7 tokens) away."""
    one = measurement(np.arange(40) % 39, [0, 6, 7], [math.log(0.5), math.log(0.4), math.log(0.25)])
    assert [p["start"] for p in top_passages([one], letters(), least=0.25 - 1e-12)] == [0, 7]
    assert [p["start"] for p in top_passages([one], letters(), least=0.2500001)] == [0]
    assert top_passages([], letters()) == []
    twenty = measurement(np.arange(400) % 39, list(range(0, 300, 7)), [-1.0] * 43)
    assert len(top_passages([twenty], letters())) == 20


def test_every_invalid_byte_is_a_character() -> None:
    data = bytes(range(0x80, 0x100))
    one = measurement(np.frombuffer(data, np.uint8), [0], [-1.0], settings=ExtractionSettings(128, 1, 1))
    text, values = character_map(one, ByteTokenizer())
    assert text == "\ufffd" * 128 and len(values) == 128
