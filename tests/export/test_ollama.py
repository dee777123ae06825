"""The Modelfile for Ollama: its template writes the prompt of our chat format."""

import re

import pytest

from niels_gpt.chat.formats import chat_format
from niels_gpt.chat.transcript import format_chat
from niels_gpt.export.ollama import modelfile
from niels_gpt.tokenizer import SPECIAL_TOKENS, ByteTokenizer, load_tokenizer
from tests import token_caches
from tests.foreign_tokenizers import make

MESSAGES = [{"role": role, "content": f"{role} says "} for role in ("system", "user", "assistant", "user")]


def render(text: str) -> str:
    """The template with MESSAGES: the part of Go's templates that it uses."""
    template = re.search(r'TEMPLATE """(.*?)"""', text, re.DOTALL)[1]
    loop = re.fullmatch(r"\{\{- range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template, re.DOTALL)
    choice = re.compile(
        r'\{\{ if eq \.Role "system" \}\}(.*?)\{\{ else if eq \.Role "user" \}\}(.*?)\{\{ else \}\}(.*?)\{\{ end \}\}'
    )
    reply_end = re.compile(r'\{\{ if eq \.Role "assistant" \}\}(.*?)\{\{ end \}\}')
    turns = []
    for message in MESSAGES:
        turn = choice.sub(lambda m, role=message["role"]: m[["system", "user", "assistant"].index(role) + 1], loop[1])
        turn = reply_end.sub(lambda m, role=message["role"]: m[1] if role == "assistant" else "", turn)
        turns.append(turn.replace("{{ .Role }}", message["role"]).replace("{{ .Content }}", message["content"]))
    return "".join(turns) + loop[2]


def test_bytes():
    text = modelfile("m.gguf", ByteTokenizer(), 64)
    assert render(text) == format_chat(MESSAGES)
    assert text.startswith("FROM ./m.gguf\n") and "PARAMETER num_ctx 64\n" in text and 'PARAMETER stop "user: "' in text


def test_tokens():
    text = modelfile("m.gguf", token_caches.tokenizer(), 64)
    sys, usr, asst, eot = SPECIAL_TOKENS
    expected = f"{sys}system says {eot}{usr}user says {eot}{asst}assistant says {eot}{usr}user says {eot}{asst}"
    assert render(text) == expected and f'PARAMETER stop "{eot}"' in text


@pytest.mark.parametrize(("name", "end"), [("smollm", "<|im_end|>"), ("llama3", "<|eot_id|>")])
def test_a_base_that_learned_to_chat_in_our_format(name, end, tmp_path):
    tokenizer = load_tokenizer(make(name, tmp_path))
    text = modelfile("m.gguf", tokenizer, 64, learned_chat=True)
    prompt = chat_format(tokenizer).fit(MESSAGES, 1000).ids
    assert tokenizer.document_start + tokenizer.encode(render(text)) == prompt and f'PARAMETER stop "{end}"' in text
    assert "TEMPLATE" not in modelfile("m.gguf", tokenizer, 64)


@pytest.mark.parametrize("name", ["a b.gguf", "x.gguf"])
def test_the_file_is_named(name):
    assert modelfile(name, ByteTokenizer(), 8).splitlines()[0] == f"FROM ./{name}"
