"""litellm and LangChain against the running server; `make test WHAT=serve` installs them."""

import pytest

MESSAGES = [{"role": "user", "content": "hello"}]


def test_litellm(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download
    litellm = pytest.importorskip("litellm")
    options = {"api_base": server.url + "/v1", "api_key": "unused", "max_retries": 0}
    made = litellm.completion(model="openai/cycle", messages=MESSAGES, max_tokens=13, temperature=0, **options)
    text = made.choices[0].message.content
    assert made.usage.completion_tokens == 13 and text
    stream = litellm.completion(
        model="openai/cycle", messages=MESSAGES, max_tokens=13, temperature=0, stream=True, **options
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    assert len(litellm.embedding(model="openai/bytes", input=["abc"], **options).data[0]["embedding"]) == 32


def test_langchain(server):
    langchain_openai = pytest.importorskip("langchain_openai")
    options = {"base_url": server.url + "/v1", "api_key": "unused", "max_retries": 0}
    chat = langchain_openai.ChatOpenAI(model="cycle", max_tokens=13, temperature=0, **options)
    text = chat.invoke([("system", "s"), ("user", "hello")]).content
    assert text and "".join(chunk.content for chunk in chat.stream([("system", "s"), ("user", "hello")])) == text
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke("hello")
    assert len(scored.response_metadata["logprobs"]["content"]) == 13
    made = langchain_openai.OpenAI(model="cycle", max_tokens=13, temperature=0, **options).invoke(" ")
    assert made == "abé€😀. "
