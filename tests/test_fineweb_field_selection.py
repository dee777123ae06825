import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.data.fineweb_edu import select_text_field
from niels_gpt.data.reading import text_rows


def test_text_is_preferred():
    assert select_text_field({"text": "the text"}) == "the text"
    assert select_text_field({"id": "an id", "content": "no", "text": "the text", "url": "no"}) == "the text"


def test_else_the_first_string_field():
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


def test_no_field_at_all():
    with pytest.raises(ValueError):
        select_text_field({})


def test_a_null_text_counts_as_absent():
    assert select_text_field({"text": None, "content": "the content"}) == "the content"
    assert select_text_field({"content": "the content", "text": None}) == "the content"


def test_an_empty_string_is_text():
    assert select_text_field({"text": "", "content": "no"}) == ""
    assert select_text_field({"content": "no", "text": ""}) == ""
    assert select_text_field({"content": "", "url": "no"}) == ""
    assert select_text_field({"text": None, "content": "", "url": "no"}) == ""


def test_a_text_of_another_type_is_no_text():
    assert select_text_field({"text": 5, "content": "the content"}) == "the content"
    assert select_text_field({"text": ["words"], "content": "the content"}) == "the content"
    assert select_text_field({"text": b"bytes", "content": "the content"}) == "the content"


def test_white_space_is_kept():
    assert select_text_field({"text": " \n a\r\n"}) == " \n a\r\n"


def test_keys_that_are_no_strings_are_shown_too():
    with pytest.raises(ValueError, match="7"):
        select_text_field({7: 8})


values = st.one_of(st.none(), st.integers(), st.text(max_size=5), st.binary(max_size=3), st.lists(st.text(max_size=3)))


@given(st.dictionaries(st.sampled_from(["text", "content", "url", "id", "body"]), values))
def test_against_the_rule_spelt_out(sample):
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


def test_it_is_one_function_for_all_loaders():
    assert select_text_field is text_rows.select_text_field
