"""The dataclasses of samples."""

import dataclasses
import typing

import pytest

from niels_gpt.data import types
from niels_gpt.data.types import ChatMessage, ChatSample, PretrainSample

FIELDS = {
    PretrainSample: ["text", "source", "meta"],
    ChatMessage: ["role", "content"],
    ChatSample: ["messages", "source", "meta"],
}


def samples():
    message = ChatMessage(role="user", content="hi")
    return [
        PretrainSample(text="a text", source="roam", meta={"path": "a.md"}),
        message,
        ChatSample(messages=[message], source="oasst1", meta={}),
    ]


@pytest.mark.parametrize(("cls", "names"), FIELDS.items())
def test_fields_in_order_all_required(cls, names):
    fields = dataclasses.fields(cls)
    assert [field.name for field in fields] == names
    for field in fields:
        assert field.default is dataclasses.MISSING
        assert field.default_factory is dataclasses.MISSING
    positional = cls(*names)
    assert [getattr(positional, name) for name in names] == names
    with pytest.raises(TypeError):
        cls(*names[:-1])


@pytest.mark.parametrize("sample", samples(), ids=lambda sample: type(sample).__name__)
def test_frozen(sample):
    for field in dataclasses.fields(sample):
        before = getattr(sample, field.name)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(sample, field.name, before)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(sample, field.name)
        assert getattr(sample, field.name) is before
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.another = 1


def test_the_roles():
    assert typing.get_args(types.Role) == ("system", "user", "assistant")
