"""The field that holds the text of a row, as the specification has it."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.data.fineweb_edu import select_text_field


def test_text_is_preferred():
    assert select_text_field({"text": "the text"}) == "the text"
    assert select_text_field({"id": "an id", "content": "no", "text": "the text", "url": "no"}) == "the text"


def test_otherwise_the_first_string_field():
    assert select_text_field({"content": "the content"}) == "the content"
    assert select_text_field({"score": 3, "content": "the content", "url": "no"}) == "the content"
    assert select_text_field({"url": "first", "content": "second"}) == "first"


@pytest.mark.parametrize(
    "sample",
    [
        {"score": 3, "labels": ["a", "b"]},
        {"score": None, "labels": b"bytes"},
        {"text": None, "labels": {"text": "inside"}},
        {"text": 5, "labels": None},
        {"score": 1.5, "labels": True, "text": None},
    ],
)
def test_no_string_field_shows_the_keys(sample):
    with pytest.raises(ValueError) as caught:
        select_text_field(sample)
    assert all(key in str(caught.value) for key in sample)


def test_a_null_text_counts_as_absent():
    assert select_text_field({"text": None, "content": "the content"}) == "the content"
    assert select_text_field({"content": "the content", "text": None}) == "the content"


def test_an_empty_string_is_text():
    assert select_text_field({"text": "", "content": "no"}) == ""
    assert select_text_field({"content": "no", "text": ""}) == ""
    assert select_text_field({"content": "", "url": "no"}) == ""
    assert select_text_field({"text": None, "content": "", "url": "no"}) == ""


def test_keys_of_other_types_are_shown():
    with pytest.raises(ValueError, match="7"):
        select_text_field({7: 8})


values = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.binary(max_size=3), st.lists(st.text(max_size=3)))


@given(st.dictionaries(st.sampled_from(["text", "content", "url", "id", "body"]), values))
def test_the_rule(sample):
    before = copy.deepcopy(sample)
    strings = [value for value in sample.values() if type(value) is str]
    if type(sample.get("text")) is str:
        strings.insert(0, sample["text"])
    if strings:
        assert select_text_field(sample) == strings[0]
    else:
        with pytest.raises(ValueError) as caught:
            select_text_field(sample)
        assert all(key in str(caught.value) for key in sample)
    assert sample == before
