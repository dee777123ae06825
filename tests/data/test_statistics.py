"""Statistics against naive counts."""

import json
import math
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.data.statistics import Statistics
from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
META = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"lang": st.sampled_from(["en", "de", "pt-BR"])}),
    st.fixed_dictionaries({"language": st.sampled_from(["en", "fr"])}),
    st.fixed_dictionaries({"lang": st.sampled_from([None, 3])}),
)
PRETRAIN = st.builds(PretrainSample, TEXT, st.just("s"), META)
MESSAGE = st.builds(ChatMessage, st.sampled_from(["system", "user", "assistant"]), TEXT)
CHAT = st.builds(ChatSample, st.lists(MESSAGE, max_size=5), st.just("s"), META)
QUANTILES = {
    name: Fraction(percent, 100)
    for name, percent in (("min", 0), ("10 %", 10), ("median", 50), ("90 %", 90), ("99 %", 99), ("max", 100))
}


def text(content, **meta):
    return PretrainSample(content, "s", meta)


def chat(*turns, **meta):
    return ChatSample([ChatMessage(role, content) for role, content in turns], "s", meta)


def parts(sample):
    return [m.content for m in sample.messages] if isinstance(sample, ChatSample) else [sample.text]


def naive(samples):
    """The same numbers with loops and exact fractions."""
    lengths, size = [], 0
    languages, roles, characters, turns = Counter(), Counter(), Counter(), Counter()
    for sample in samples:
        lengths.append(sum(len(part) for part in parts(sample)))
        size += sum(len(part.encode("utf-8")) for part in parts(sample))
        language = sample.meta.get("lang", sample.meta.get("language"))
        if isinstance(language, str):
            languages[language] += 1
        if isinstance(sample, ChatSample):
            turns[str(len(sample.messages))] += 1
            for message in sample.messages:
                roles[message.role] += 1
                characters[message.role] += len(message.content)
    ordered = sorted(lengths)
    wanted = {
        "samples": len(lengths),
        "characters": sum(lengths),
        "bytes": size,
        "length_quantiles": {
            name: ordered[math.floor((len(ordered) - 1) * q)] if ordered else None for name, q in QUANTILES.items()
        },
    }
    if languages:
        wanted["languages"] = dict(languages)
    if turns:
        wanted["roles"] = {role: {"messages": n, "characters": characters[role]} for role, n in roles.items()}
        wanted["turns"] = dict(turns)
    return wanted


def check(samples):
    summary = Statistics().add_all(samples).summary()
    mean = summary.pop("mean_length")
    wanted = naive(samples)
    assert summary == wanted
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    if samples:
        assert abs(mean - Fraction(wanted["characters"], len(samples))) <= Fraction(1, 20) + Fraction(1, 10**9)
    else:
        assert mean is None


@settings(max_examples=60)
@given(st.lists(PRETRAIN, max_size=40) | st.lists(CHAT, max_size=20))
def test_samples_match_a_naive_count(samples):
    check(samples)


@pytest.mark.parametrize("n", [1, 2, 3, 11, 101])
def test_quantiles_of_many_lengths(n):
    check([text("x" * (i * 7919 % n)) for i in range(n)])


def test_a_quantile_is_the_length_of_a_sample():
    summary = Statistics().add_all([text("x" * n) for n in (10, 1000, 30, 20)]).summary()
    assert summary["length_quantiles"] == {"min": 10, "10 %": 10, "median": 20, "90 %": 30, "99 %": 30, "max": 1000}
    assert summary["mean_length"] == 265.0


def test_the_mean_has_one_decimal():
    assert Statistics().add_all([text("x"), text("x"), text("xx")]).summary()["mean_length"] == 1.3


def test_a_text_has_neither_roles_nor_turns_nor_unknown_languages():
    summary = Statistics().add_all([text("a", id=3), text("b", lang=None), text("c", language=7)]).summary()
    assert set(summary) == {"samples", "characters", "bytes", "mean_length", "length_quantiles"}


def test_languages_most_common_first():
    samples = [text("a", lang="de"), text("b", language="en"), text("c", lang="en"), text("d"), text("e", lang="en")]
    summary = Statistics().add_all(samples).summary()
    assert list(summary["languages"].items()) == [("en", 3), ("de", 1)]
    assert Statistics().add_all([chat(("user", "x"), lang="fr")]).summary()["languages"] == {"fr": 1}


def test_roles_and_turns():
    samples = [
        chat(("user", "abc"), ("assistant", "de")),
        chat(("system", "s"), ("user", "u"), ("assistant", "a")),
        chat(("user", "é"), ("assistant", "four")),
        *[chat(*[("user", "x"), ("assistant", "yz")] * 5)] * 2,
    ]
    summary = Statistics().add_all(samples).summary()
    assert summary["samples"] == 5
    assert summary["roles"] == {
        "system": {"messages": 1, "characters": 1},
        "user": {"messages": 13, "characters": 15},
        "assistant": {"messages": 13, "characters": 27},
    }
    assert list(summary["turns"].items()) == [("2", 2), ("3", 1), ("10", 2)]
    assert summary["length_quantiles"]["max"] == 15


def test_no_samples():
    summary = Statistics().summary()
    assert summary["samples"] == summary["characters"] == summary["bytes"] == 0
    assert summary["mean_length"] is None
    assert set(summary["length_quantiles"].values()) == {None}
    assert not {"languages", "roles", "turns"} & set(summary)
    json.dumps(summary, allow_nan=False)
