"""A real server on a free port of 127.0.0.1, in a thread of the tests, with small random models."""

import contextlib
import faulthandler
import io
import json
import sys
import threading
import time

import httpx
import openai
import pytest
import torch
from fastapi import FastAPI

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.serve.app import create_app
from niels_gpt.serve.limits import Admission, Limits
from niels_gpt.serve.model_worker import ModelWorker
from niels_gpt.serve.served_model import ServedModel
from niels_gpt.serve.server import Server, address, bind
from niels_gpt.tokenizer import ByteTokenizer
from tests.inference.models import spread_model, token_model
from tests.token_caches import tokenizer

LIMITS = Limits(slots=4, queue=4, choices=8, request_seconds=60.0)


CYCLE = "abé€😀. "
"""What the model `cycle` writes again and again; all of its bytes differ."""


def cycle_model(text=CYCLE, T=96):
    """A byte model that continues each byte of the text by the next one, and every other byte by the first."""
    data = text.encode()
    assert len(set(data)) == len(data)
    torch.manual_seed(1)
    model = GPT(ModelConfig(V=256, T=T, C=64, L=1, H=1, dropout=0.0, tie_embeddings=False))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                p.zero_()  # the blocks add nothing
        embedding = torch.nn.functional.normalize(torch.randn(256, 64), dim=1)
        model.tok_emb.weight.copy_(embedding)
        model.lm_head.weight.zero_()
        for byte, following in zip(data, data[1:] + data[:1], strict=True):
            model.lm_head.weight[following] += 20 * embedding[byte]
    return model.eval()


def served(name, model, tokenizer=None, limits=LIMITS, **engine_options):
    engine = Engine(model, slots=limits.slots, **{"prefix_tokens": 4096, "context_overflow": "half", **engine_options})
    tokenizer = tokenizer or ByteTokenizer()
    return ServedModel(name, model, tokenizer, ModelWorker(engine, name), Admission(limits), created=7, step=5)


class Running:
    """A server that listens; `app.state` is its state, `log()` its access log."""

    def __init__(self, app: FastAPI, server: Server, url: str, log: io.StringIO) -> None:
        self.app = app
        self.server = server
        self.url = url
        self._log = log

    def client(self, key="unused", **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, **{"max_retries": 0, "timeout": 60.0, **options})

    def http(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60.0, **options)

    def log(self):
        return [json.loads(line) for line in self._log.getvalue().splitlines()]

    def wait_until(self, condition, seconds=60.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not come true in time"
            time.sleep(0.01)


@contextlib.contextmanager
def running(models, limits=LIMITS, **options):
    log = io.StringIO()
    app = create_app(models, limits=limits, access_log=log, **options)
    listening = bind("127.0.0.1", 0)
    server = Server(app, limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield Running(app, server, address(listening), log)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        listening.close()
        if thread.is_alive():
            faulthandler.dump_traceback(sys.__stderr__)
        assert not thread.is_alive()


@pytest.fixture(scope="package")  # it ends before the tests of other packages, which replace clocks and send signals
def server():
    """A server with two models over bytes and one over tokens."""
    models = [
        served("bytes", spread_model(T=96, dropout=0.0)),
        served("tokens", token_model(T=64), tokenizer()),
        served("cycle", cycle_model()),
    ]
    with running(models) as found:
        yield found


@pytest.fixture
def client(server):
    with server.client() as made:
        yield made


@pytest.fixture
def http(server):
    with server.http() as made:
        yield made
