"""The client of the servers that are compared, and the model that they serve."""

import asyncio
import http.server
import json
import threading
import time
from typing import Any, ClassVar

import pytest
import torch

from bench import serving
from bench.case import Unavailable
from bench.models import V0
from niels_gpt.inference.generation import generate
from niels_gpt.runs.loading import load_run

QUICK = V0.scaled(True)


def event(text="", finish=None, **more):
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish}], **more}).encode() + b"\n\n"


STREAM = [event("a"), event("b"), event("c"), event(finish="length"), b"data: [DONE]\n\n"]


def read(chunks, tokens, *, usage):
    """Read a stream from a server that sends these bytes, chunk by chunk."""

    async def run():
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            for chunk in chunks:
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(0.001)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = serving.Address(server.sockets[0].getsockname()[1], "m", usage=usage)
        async with server:
            return await serving.read_stream(address, tokens)

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_events_with_text_are_counted_however_they_arrive(size):
    data = b"".join(STREAM)
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    found = read(chunks, 3, usage=False)
    assert found.tokens == 3 and 0 < found.first <= found.last
    for wrong in (2, 4):
        with pytest.raises(RuntimeError, match=f"{wrong} tokens"):
            read(chunks, wrong, usage=False)


def test_a_stream_that_breaks_off_is_an_error():
    with pytest.raises(RuntimeError, match="3 tokens"):
        read(STREAM[:-1], 3, usage=False)


def test_usage_is_counted_where_there_is_one():
    usage = event("abc", usage={"completion_tokens": 5})
    assert read([usage, STREAM[-1]], 5, usage=True).tokens == 5
    with pytest.raises(RuntimeError, match="3 tokens"):
        read(STREAM, 3, usage=True)  # three events, but no usage


class ChatServer(http.server.BaseHTTPRequestHandler):
    """Replies with the number of the turn, in two events, after an event without text and 30 ms."""

    bodies: ClassVar[list[dict[str, Any]]] = []
    texts: ClassVar[tuple[str, ...]] = ("turn ", "{}")

    def do_POST(self):
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()
        for text in ("", *self.texts):
            delta = {"content": text.format(len(self.bodies))} if text else {"role": "assistant"}
            self.wfile.write(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
            self.wfile.flush()
            time.sleep(0.03)
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *args):
        pass


@pytest.fixture
def chat_server(monkeypatch):
    monkeypatch.setattr(ChatServer, "bodies", [])
    with http.server.HTTPServer(("127.0.0.1", 0), ChatServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield serving.Address(server.server_port, "m")
        server.shutdown()


def test_a_conversation_sends_the_replies_back_and_times_the_first_text(chat_server):
    seconds = serving.converse(chat_server, ["a", "b", "c"], 4)
    assert [[message["content"] for message in body["messages"]] for body in ChatServer.bodies] == [
        ["a"],
        ["a", "turn 1", "b"],
        ["a", "turn 1", "b", "turn 2", "c"],
    ]
    assert [message["role"] for message in ChatServer.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert len(seconds) == 3 and all(0.03 <= each < 10 for each in seconds)


def test_a_reply_without_text_is_an_error(chat_server, monkeypatch):
    monkeypatch.setattr(ChatServer, "texts", ())
    with pytest.raises(RuntimeError, match="turn 1"):
        serving.converse(chat_server, ["a"], 4)


def test_every_token_is_a_character():
    """Else the events of llama-cpp-python would not count tokens."""
    model = load_run(serving._save_checkpoint(QUICK), None, "cpu").model
    text = generate(model, serving.PROMPT, max_new_tokens=40, temperature=0.0)
    assert len(text) == len(serving.PROMPT) + 40 and text.isascii()
    assert torch.count_nonzero(model.tok_emb.weight[128:]) == 0 < torch.count_nonzero(model.tok_emb.weight[:128])


def test_a_server_that_does_not_start_is_reported_with_its_last_line():
    with pytest.raises(RuntimeError, match=r"bench\.no_such_server did not start: .*No module named"):
        serving._start(["bench.no_such_server"])


@pytest.mark.parametrize(
    ("missing", "error", "named"),
    [("llama_cpp", ModuleNotFoundError, "llama_cpp"), ("fastapi", Unavailable, r"fastapi.*llama-cpp-python\[server\]")],
)
def test_llama_cpp_without_its_server_is_not_the_same_as_none(monkeypatch, missing, error, named):
    def fail(name):
        raise ModuleNotFoundError(f"no {missing}", name=missing)

    monkeypatch.setattr(serving.importlib, "import_module", fail)
    with pytest.raises(error, match=named):
        serving.start_llama_cpp(QUICK)
