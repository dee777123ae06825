"""The Jinja templates give the ids of our own chat formats."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from niels_gpt.chat.formats import chat_format
from niels_gpt.chat.transcript import format_chat
from niels_gpt.export.chat_template import chat_template
from niels_gpt.tokenizer import SPECIAL_TOKENS, ByteTokenizer
from tests import token_caches

CHATS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " Be  brief.\n"}, {"role": "user", "content": "\n\u2581🙂 {{ 1 }} "}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": "yes\n"}, {"role": "user", "content": "ok?"}],
    [],
]


def render(template, messages, *, prompt):
    return render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt)[0][0]


@pytest.mark.parametrize("messages", CHATS)
def test_tokens(messages):
    tokenizer = token_caches.tokenizer()
    template, chats = chat_template(tokenizer), chat_format(tokenizer)
    assert tokenizer.encode(render(template, messages, prompt=False)) == chats.encode(messages).ids
    assert tokenizer.encode(render(template, messages, prompt=True)) == chats.fit(messages, limit=10**6).ids


@pytest.mark.parametrize("messages", CHATS)
def test_bytes(messages):
    template = chat_template(ByteTokenizer())
    assert render(template, messages, prompt=True) == format_chat(messages)
    assert render(template, messages, prompt=False) + "assistant: " == format_chat(messages)


@pytest.mark.parametrize("special", SPECIAL_TOKENS)
def test_special_strings_in_a_message_are_refused(special):
    template = chat_template(token_caches.tokenizer())
    with pytest.raises(Exception, match=special[2:8]):
        render(template, [{"role": "user", "content": f"a {special} b"}], prompt=True)
    render(template, [{"role": "user", "content": special[:-1]}], prompt=True)  # only a part of one


def test_unknown_roles_are_refused():
    for tokenizer in (token_caches.tokenizer(), ByteTokenizer()):
        with pytest.raises(Exception, match=r"tool.*system, user, assistant"):
            render(chat_template(tokenizer), [{"role": "tool", "content": "x"}], prompt=True)
