"""The field that holds the text of a row, as the specification has it."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.data.fineweb_edu import select_text_field


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "the text"}, "the text"),
        ({"id": "an id", "content": "no", "text": "the text"}, "the text"),
        ({"score": 3, "content": "the content", "url": "no"}, "the content"),
        ({"url": "first", "content": "second"}, "first"),
        ({"text": None, "content": "null is absent"}, "null is absent"),
        ({"content": "no", "text": ""}, ""),
        ({"text": None, "content": "", "url": "no"}, ""),
    ],
)
def test_text_or_else_the_first_string_field(row, text):
    assert select_text_field(row) == text


@pytest.mark.parametrize(
    "sample", [{"score": 3, "labels": ["a", "b"]}, {"text": None, "labels": {"text": "inside"}}, {7: 8}]
)
def test_no_string_field_shows_the_keys(sample):
    with pytest.raises(ValueError) as caught:
        select_text_field(sample)
    assert all(str(key) in str(caught.value) for key in sample)


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
