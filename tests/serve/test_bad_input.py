"""Input that no client library sends: every answer is an error in OpenAI's shape, and the server stays up."""

import json
import math
import socket
import time

import httpx
import pytest

from niels_gpt.serve import errors

CHAT = "/v1/chat/completions"
OK = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
}
"""What clients send after a model has called a tool."""


def check_error(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and "Traceback" not in error["message"]
    return error


@pytest.fixture(autouse=True)
def stays_up(http):
    yield
    assert http.get("/health").json() == {"status": "ok"}
    assert http.post(CHAT, json=OK).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b"[" * 200_000,
        b'{"model": "bytes", "messages": ' + b"[" * 100_000,
        b'{"model": "bytes", "max_tokens": ' + b"9" * 10_000 + b"}",
        b'{"model": "bytes", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "bytes", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "bytes", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"model": "bytes", "messages": [{"role": "user", "content": "x"}], "user": "\\u0000", "x": 1}',
    ],
)
def test_bodies_that_are_no_requests(http, body):
    for path in (CHAT, "/v1/completions", "/v1/embeddings"):
        check_error(http.post(path, content=body, headers={"content-type": "application/json"}), 400)
    check_error(http.post(CHAT, content=body, headers={"content-type": "text/plain"}), 400)


@pytest.mark.parametrize(
    ("body", "code", "facts"),
    [
        (b"", "empty_body", ["empty"]),
        (b'{"model": bytes}', "invalid_json", ["character 10"]),
        (b'{"model": "\xff"}', "invalid_json", ["UTF-8", "byte 11"]),
        (b'{"model": "[[", "messages": ' + b"[" * 100_000, "invalid_json", ["nested", "64", "byte 91"]),  # 28 + 63
        (b'{"user": "' + b"1" * 5000 + b'", "seed": -' + b"9" * 10_000 + b"}", "invalid_json", ["4300", "byte 5022"]),
    ],
)
def test_what_is_wrong_with_a_body_and_where(http, body, code, facts):
    error = check_error(http.post(CHAT, content=body, headers={"content-type": "application/json"}), 400)
    assert (error["code"], error["type"]) == (code, "invalid_request_error")
    assert all(fact in error["message"] for fact in facts), error["message"]


def test_an_empty_input_is_not_continued(http):
    error = check_error(http.post("/v1/embeddings", json={"model": "bytes", "input": ""}), 400)
    assert error["param"] == "input" and "continue" not in error["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 101}, "repetition_penalty"),
        ({"best_of": 2}, None),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["x" * 300]}, "stop.0"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"256": 1}}, None),
        ({"top_logprobs": 3}, None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 20, "max_tokens": 4096, "n": 7}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [*OK["messages"], CALL]}, "messages.1"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages.0.content"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, None),
        ({"temprature": 1}, "temprature"),
        ({"file": "/etc/passwd"}, "file"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_parameters_out_of_range(http, change, param):
    error = check_error(http.post(CHAT, json={**OK, **change}), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/v1/completions", {"prompt": [None] * 300_000}),
        ("/v1/completions", {"prompt": [[]] * 300_000}),
        ("/v1/embeddings", {"input": [{}] * 300_000}),
        (CHAT, {"messages": [{}] * 300_000}),
        (CHAT, {"messages": [{"role": "user", "content": [{}] * 300_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x", **{str(i): 0 for i in range(200_000)}}]}),
        (CHAT, {"logit_bias": {str(i): "x" for i in range(200_000)}}),
        (CHAT, {"stop": [None] * 300_000}),
        (CHAT, {str(i): 0 for i in range(200_000)}),
    ],
)
def test_only_the_first_of_many_errors_is_sought(http, monkeypatch, path, change):
    """Each error takes about a kilobyte and ten microseconds, and the event loop waits for all of them."""
    counts = []
    describe = errors.describe_validation

    def counting(found):
        counts.append(len(found))
        return describe(found)

    monkeypatch.setattr(errors, "describe_validation", counting)
    check_error(http.post(path, json={"model": "bytes", **change}), 400)
    assert len(counts) == 1 and counts[0] < 10


def test_what_is_not_supported_says_so(http):
    error = check_error(http.post(CHAT, json={**OK, "response_format": {"type": "json_object"}}), 400)
    assert "response_format is not supported" in error["message"]
    error = check_error(http.post(CHAT, json={**OK, "messages": [CALL]}), 400)
    assert "tools are not supported" in error["message"] and "tool_calls" in error["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ""},
        {"prompt": []},
        {"prompt": [""]},
        {"prompt": [[]]},
        {"prompt": [256]},
        {"prompt": [-1]},
        {"prompt": [1, "a"]},
        {"prompt": {"file": "/etc/passwd"}},
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "suffix": "y"},
        {"prompt": "x", "best_of": 3},
        {"prompt": ["x"] * 9},
        {"prompt": "x" * 97, "echo": True, "logprobs": 1},
        {"prompt": "x", "logprobs": 21},
        {"prompt": "x" * (2**20 + 1)},
        {"prompt": [1] * (2**18 + 1)},
    ],
)
def test_prompts_that_cannot_be_continued(http, change):
    check_error(http.post("/v1/completions", json={"model": "bytes", "max_tokens": 1, **change}), 400)


@pytest.mark.parametrize(
    "name",
    ["", "other", "../../etc/passwd", "/etc/passwd", "..", "bytes/../tokens", "a" * 300, "\u0000", "%2e%2e", "😀"],
)
def test_unknown_models(http, name):
    error = check_error(http.post(CHAT, json={**OK, "model": name}), 404)
    assert error["code"] == "model_not_found"
    check_error(http.post("/v1/embeddings", json={"model": name, "input": "x"}), 404)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "/v1/models/..%2f..%2fetc%2fpasswd", "/static/../app.py", "//", "/v1/"]
)
def test_paths_that_do_not_exist(http, path):
    check_error(http.get(path), 404)


def test_methods_that_do_not_exist(http):
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
        check_error(http.request(method, CHAT), 405)
    check_error(http.post("/health"), 405)


def test_head_is_get_without_a_body(server, http):
    """What monitors and load balancers send."""
    paths = ("/health", "/metrics", "/v1/models", "/v1/models/bytes", "/openapi.json", "/nothing", CHAT)
    line = 'requests_total{route="/v1/models/{model_id}",status="200"} '

    def counted():
        return float(http.get("/metrics").text.partition(line)[2].partition("\n")[0] or 0)

    before = counted()
    for path in paths:
        head, get = http.head(path), http.get(path)
        assert head.status_code == get.status_code and not head.content
        for name in ("content-type", "content-security-policy", "allow"):
            assert head.headers.get(name) == get.headers.get(name)
        if path != "/metrics":  # which counts these requests
            assert int(head.headers["content-length"]) == len(get.content) > 0
    assert sorted(line["method"] for line in server.log()[-2:]) == ["GET", "HEAD"]  # written after the responses
    assert counted() == before + 2


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (CHAT, {"stop": ["a"] * 5}, "at most 4"),
        ("/v1/embeddings", {"input": []}, "at least 1"),
        ("/v1/completions", {"prompt": []}, "at least 1"),
    ],
)
def test_a_list_of_a_wrong_length_is_not_called_a_wrong_type(http, path, change, words):
    body = {**OK, **change} if path == CHAT else {"model": "bytes", **change}
    assert words in check_error(http.post(path, json=body), 400)["message"]


def test_bodies_that_are_not_sent_as_json(http):
    """curl -d without a header sends the body as a form."""
    for options in ({"data": {"a": "b"}}, {"content": json.dumps(OK)}):
        assert "Content-Type: application/json" in check_error(http.post(CHAT, **options), 400)["message"]


def test_large_bodies(http):
    check_error(http.post(CHAT, content=b"x" * (4 * 2**20 + 1)), 413)
    check_error(http.post(CHAT, content=(b"x" * 2**20 for _ in range(6))), 413)  # without Content-Length


@pytest.mark.parametrize("size", [8 * 4 * 2**20 + 1, 99_999_999_999, 99_999_999_999_999_999])
def test_a_declared_size_far_above_the_limit_is_refused_at_once(server, size):
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=20) as sock:  # the body has 30 s
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size)
        assert sock.recv(1000).startswith(b"HTTP/1.1 413")


def test_bodies_of_gigabytes_are_cut_off(server):
    with server.http() as http, pytest.raises(httpx.HTTPError):
        response = http.post(CHAT, content=(b"x" * 2**20 for _ in range(10_000)))
        check_error(response, 413)
        raise httpx.WriteError("the response came before the connection closed")


@pytest.mark.parametrize(
    "text",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(10_000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_what_is_not_http(server, text):
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=20) as sock:
        sock.sendall(text)
        received = b""
        try:
            while not received.endswith(b"}") and (chunk := sock.recv(10_000)):
                received += chunk
        except ConnectionResetError:
            pass  # it did not read all of it
    if received:
        head, _, body = received.partition(b"\r\n\r\n")
        assert head.split()[1] in (b"400", b"404", b"403", b"431")
        assert "error" in json.loads(body)


@pytest.mark.parametrize("size", [33_000, 36_000, 40_000, 60_000])
def test_large_headers_are_431(server, size):
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=20) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * size + b"\r\n\r\n")
        received = b""
        while not received.endswith(b"}}") and (chunk := sock.recv(10_000)):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.partition(b"\r\n")[0] == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_numbers_in_responses_are_numbers(http):
    """A bias of -100 gives probabilities near 0, whose logarithms must stay JSON."""
    body = {**OK, "max_tokens": 20, "logprobs": True, "top_logprobs": 20, "temperature": 2}
    text = http.post(CHAT, json=body).text
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert math.isfinite(json.loads(text)["choices"][0]["logprobs"]["content"][0]["logprob"])


def test_a_conversation_of_ten_thousand_turns(http):
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i}"} for i in range(10_000)]
    for model, context in (("bytes", 96), ("tokens", 64)):
        began = time.monotonic()
        found = http.post(CHAT, json={**OK, "model": model, "messages": turns})
        assert time.monotonic() - began < 20
        assert context // 5 < found.json()["usage"]["prompt_tokens"] <= 3 * context // 4  # the latest turns
    check_error(http.post(CHAT, json={**OK, "messages": turns * 11}), 413)
    many = [{"role": "user", "content": ""}] * 100_001
    check_error(http.post(CHAT, json={**OK, "messages": many}), 400)
