"""llama-cpp-python's server, as `python -m bench serve` runs it: it serves our weights and streams what we decode."""

import json
import urllib.request

import pytest

from bench import serving
from bench.models import V0
from niels_gpt.inference.generation import generate
from niels_gpt.runs.loading import load_run

pytest.importorskip("llama_cpp.server.app")
TOKENS = 40


@pytest.mark.slow
@pytest.mark.parametrize("all_cores", [False, True])
def test_every_stream_is_our_greedy_text(monkeypatch, all_cores):
    """One request at a time, and none ends because another begins."""
    size = V0.scaled(True)
    path = serving._save_checkpoint(size)
    monkeypatch.setattr(serving, "_save_checkpoint", lambda size: path)
    address = serving.start_llama_cpp(size, all_cores=all_cores)
    assert [stream.tokens for stream in serving.read_streams(address, 3, TOKENS)] == [TOKENS] * 3

    body = {"prompt": serving.PROMPT, "max_tokens": TOKENS, "temperature": 0, **address.options}
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{address.port}/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == TOKENS
    text = generate(load_run(path, None, "cpu").model, serving.PROMPT, max_new_tokens=TOKENS, temperature=0.0)
    assert serving.PROMPT + answer["choices"][0]["text"] == text
