"""Queues, disconnects, slow readers, time limits: one client never stops the others, and slots are always freed."""

import contextlib
import dataclasses
import json
import socket
import threading

import httpx
import openai
import pytest
import torch

from niels_gpt.serve import inspect_routes
from niels_gpt.serve.limits import Admission
from niels_gpt.serve.openai_responses import ChatFormat, CompletionFormat
from tests.serve.conftest import LIMITS, cycle_model, running, served

ENDLESS = {"model": "cycle", "prompt": " ", "max_tokens": 1_000_000, "temperature": 0}
"""As many tokens as the engine allows: minutes, so that only the client or the server ends it."""


@contextlib.contextmanager
def small_server(**changes):
    endless = {"new_tokens": 1_000_000, "alternatives": 10**9, "request_seconds": 3600.0}
    limits = dataclasses.replace(LIMITS, **{"slots": 2, "queue": 1, **endless, **changes})
    with running([served("cycle", cycle_model(), limits=limits)], limits) as found:
        yield found


def move_clock(server, monkeypatch, seconds):
    """Let the timers of the next so many seconds fire now."""
    loop = server.app.state.models["cycle"].worker._loop
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + seconds)


def active(server):
    return server.app.state.models["cycle"].admission.active


def engine_of(server):
    return server.app.state.models["cycle"].worker.engine


def connection_to(server):
    return socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=60)


def raw_request(server, body, *, path="/v1/completions", receive_buffer=None):
    """Return a socket on which a request was sent."""
    data = json.dumps(body).encode()
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", httpx.URL(server.url).port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    sock.sendall(head.encode() + b"\r\n" + data)
    return sock


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slot_at_once(stream):
    with small_server() as server:
        sockets = [raw_request(server, {**ENDLESS, "stream": stream}) for _ in range(2)]
        if stream:
            assert all(sock.recv(10).startswith(b"HTTP/1.1 2") for sock in sockets)
        server.wait_until(lambda: active(server) == 2)
        for sock in sockets:
            sock.close()
        with server.client() as client:
            made = client.completions.create(model="cycle", prompt=" ", max_tokens=3, temperature=0)
        assert made.choices[0].text == "ab\ufffd"
        server.wait_until(lambda: active(server) == 0 and not engine_of(server).busy)
        server.wait_until(lambda: [line.get("outcome") for line in server.log()].count("disconnect") == 2)
        assert all(line["tokens_out"] < 1_000_000 for line in server.log())


def test_a_waiting_client_that_goes_away_leaves_the_queue():
    with small_server() as server:
        running_streams = [raw_request(server, {**ENDLESS, "stream": True}) for _ in range(2)]
        server.wait_until(lambda: active(server) == 2)
        waiting = raw_request(server, ENDLESS)
        server.wait_until(lambda: active(server) == 3)
        waiting.close()
        server.wait_until(lambda: active(server) == 2)
        for sock in running_streams:
            sock.close()


def test_a_full_queue_is_429():
    with small_server() as server, server.client() as client:
        streams = [raw_request(server, {**ENDLESS, "stream": True}) for _ in range(3)]
        server.wait_until(lambda: active(server) == 3)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="cycle", prompt=" ", max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert caught.value.code == "queue_full"
        with pytest.raises(openai.RateLimitError):
            client.embeddings.create(model="cycle", input="x")
        for sock in streams:
            sock.close()
        server.wait_until(lambda: active(server) == 0)
        assert client.completions.create(model="cycle", prompt=" ", max_tokens=1).choices


def test_more_than_ever_fit_is_400():
    """The openai package repeats a request after 429; this one would never succeed."""
    with small_server() as server, server.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="cycle", prompt=" ", max_tokens=1, n=4)
        assert caught.value.param == "n"
        assert len(client.completions.create(model="cycle", prompt=" ", max_tokens=1, n=3).choices) == 3
        assert active(server) == 0


def test_many_clients_at_a_time():
    limits = dataclasses.replace(LIMITS, slots=3, queue=100)
    with running([served("cycle", cycle_model(), limits=limits)], limits) as server:
        results = {}

        def ask(number):
            with server.client() as client:
                stream = client.completions.create(
                    model="cycle", prompt=" ", max_tokens=13 * (1 + number % 3), temperature=0, stream=True
                )
                results[number] = "".join(chunk.choices[0].text for chunk in stream)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {number: "abé€😀. " * (1 + number % 3) for number in range(24)}
        server.wait_until(lambda: active(server) == 0)


def test_a_reader_that_stops_does_not_stop_the_others():
    with small_server(slots=4, stall_seconds=1.0) as server, server.client() as client:
        # It reads nothing, so the buffers of both sides are full at some time.
        idle = raw_request(server, {**ENDLESS, "stream": True, "logprobs": 20, "n": 3}, receive_buffer=4096)
        server.wait_until(lambda: active(server) == 3)
        made = client.completions.create(model="cycle", prompt=" ", max_tokens=26, temperature=0)
        assert made.usage.completion_tokens == 26
        server.wait_until(lambda: active(server) == 0)
        server.wait_until(lambda: len(server.server.server_state.connections) == 1)  # the client's
        assert idle.fileno() >= 0
        idle.close()


def test_a_large_response_is_not_built_in_the_event_loop(monkeypatch):
    threads = []
    for kind in (ChatFormat, CompletionFormat):
        build = kind.whole

        def whole(self, *given, build=build):
            threads.append(threading.current_thread().name)
            return build(self, *given)

        monkeypatch.setattr(kind, "whole", whole)
    with small_server() as server, server.client() as client:
        client.completions.create(model="cycle", prompt=" ", max_tokens=2, logprobs=20)
        messages = [{"role": "user", "content": "x"}]
        client.chat.completions.create(model="cycle", messages=messages, max_tokens=2, logprobs=True, top_logprobs=20)
        assert all(name.startswith("asyncio_") for name in threads) and len(threads) == 2


def test_requests_that_take_too_long():
    with small_server(request_seconds=0.3) as server, server.client() as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**ENDLESS)
        assert caught.value.status_code == 504
        server.wait_until(lambda: active(server) == 0)
        server.wait_until(lambda: [line.get("outcome") for line in server.log()] == ["timeout"])


def test_streams_that_take_too_long(monkeypatch):
    with small_server(request_seconds=600.0) as server, server.client() as client:
        stream = client.completions.create(**ENDLESS, stream=True)
        next(stream)
        move_clock(server, monkeypatch, 600.0)
        with pytest.raises(openai.APIError, match="longer than 600 s"):
            for _ in stream:
                pass
        server.wait_until(lambda: active(server) == 0)
        server.wait_until(lambda: [line.get("outcome") for line in server.log()] == ["timeout"])


def test_bodies_that_never_end():
    with small_server(body_seconds=0.3) as server, connection_to(server) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert sock.recv(100).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("start", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_headers_that_never_end(start):
    closed = contextlib.suppress(ConnectionResetError, BrokenPipeError)
    with small_server(head_seconds=0.3) as server, connection_to(server) as sock, closed:
        sock.sendall(start)
        assert sock.recv(100) == b""


def test_an_idle_connection_that_was_used_stays_open_for_longer(monkeypatch):
    with small_server(head_seconds=30.0) as server, server.http() as http:
        assert http.get("/health").status_code == 200
        [used] = server.server.server_state.connections
        with connection_to(server) as unused:
            server.wait_until(lambda: len(server.server.server_state.connections) == 2)
            move_clock(server, monkeypatch, 40.0)  # a connection that was used has 60 s
            with contextlib.suppress(ConnectionResetError):
                assert unused.recv(100) == b""
        server.wait_until(lambda: server.server.server_state.connections == {used})
        assert http.get("/health").status_code == 200
        assert server.server.server_state.connections == {used}


def test_too_many_connections():
    with small_server(connections=5) as server:
        sockets = [connection_to(server) for _ in range(5)]
        server.wait_until(lambda: len(server.server.server_state.connections) == 5)
        with contextlib.suppress(ConnectionResetError), connection_to(server) as sock:
            assert sock.recv(100) == b""
        for sock in sockets:
            sock.close()
        server.wait_until(lambda: not server.server.server_state.connections)
        with server.http() as http:
            assert http.get("/health").status_code == 200


def test_a_model_that_fails_fails_its_requests_only(monkeypatch):
    with small_server() as server, server.client() as client:
        engine = engine_of(server)
        step = engine.step

        def broken():
            raise FloatingPointError("the logits are nan")

        monkeypatch.setattr(engine, "step", broken)
        with pytest.raises(openai.InternalServerError, match="the logits are nan"):
            client.completions.create(model="cycle", prompt=" ", max_tokens=3)
        monkeypatch.setattr(engine, "step", step)
        server.wait_until(lambda: not engine.busy)  # until then a failed step may fail a request that comes after it
        assert client.completions.create(model="cycle", prompt=" ", max_tokens=2, temperature=0).choices[0].text == "ab"
        assert active(server) == 0


@pytest.mark.parametrize("weight", ["lm_head.weight", "tok_emb.weight"])
def test_broken_weights_fail_every_route_that_uses_them(weight):
    model = cycle_model()
    with torch.no_grad():
        model.get_parameter(weight)[5] = float("nan")
        model.get_parameter(weight)[ord("x")] = float("nan")
    prompt = {"model": "cycle", "text": "x"}
    requests = {
        "/v1/completions": {"model": "cycle", "prompt": "x", "logprobs": 2},
        "/v1/chat/completions": {"model": "cycle", "messages": [{"role": "user", "content": "x"}], "stream": True},
        "/api/reply": prompt,
        "/api/tokens": {**prompt, "reply": [65, 66]},
        "/api/logit_lens": prompt,
    }
    if weight == "tok_emb.weight":
        requests["/v1/embeddings"] = {"model": "cycle", "input": "x"}
        requests["/v1/embeddings?base64"] = {"model": "cycle", "input": "x", "encoding_format": "base64"}
        requests["/api/attention"] = {**prompt, "layer": 0, "head": 0}
    models = [served("cycle", model), served("fine", cycle_model())]
    with running(models, routers=[inspect_routes.router]) as server, server.http() as http:
        for path, body in requests.items():
            response = http.post(path, json=body)
            assert response.status_code == 500, path
            assert response.json()["error"]["code"] == "model_failed", path
            fine = http.post("/v1/completions", json={"model": "fine", "prompt": " ", "max_tokens": 2})
            assert fine.status_code == 200
        assert http.get("/health").status_code == 200
        assert active(server) == 0


def test_the_wait_grows_with_the_queue():
    admission = Admission(dataclasses.replace(LIMITS, slots=1, queue=9))
    since = admission.admit(10)
    with pytest.raises(Exception) as caught:
        admission.admit(1)
    assert int(caught.value.retry_after) == 10
    admission.leave(10, since)
    assert admission.active == 0


def test_a_body_of_tiny_chunks_does_not_stop_the_others():
    chunks = 150_000
    with small_server(body_seconds=60.0) as server, server.http() as http:
        sock = connection_to(server)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        sender = threading.Thread(
            target=sock.sendall, args=(head + b"\r\n" + b"1\r\n \r\n" * chunks + b"2\r\n{}\r\n0\r\n\r\n",)
        )
        sender.start()
        answered = 0
        sock.settimeout(0.001)
        response = b""
        while not response:
            assert http.get("/health").status_code == 200
            answered += 1
            with contextlib.suppress(TimeoutError):
                response = sock.recv(1000)
        sender.join()
        sock.close()
    assert response.startswith(b"HTTP/1.1 400")
    assert answered > 8  # 1 if each read was parsed at once
