"""The API of the page: replies by ids, forks, tokens, attention, logit lens, provenance."""

import json
import math
import socket

import pytest
import torch

from niels_gpt.chat.untrusted import encode_untrusted
from niels_gpt.inference.inspection import attention, logit_lens
from niels_gpt.serve.page_routes import PAGE_ROUTERS, STATIC
from tests.inference.models import spread_model, token_model
from tests.serve.conftest import CYCLE, cycle_model, running, served
from tests.token_caches import tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server():
    models = [
        served("bytes", spread_model(T=96, dropout=0.0)),
        served("tokens", token_model(T=64), tokenizer()),
        served("cycle", cycle_model()),
        served("stops", cycle_model("\nuser: xyz", T=96)),
        served("slide", spread_model(T=96, dropout=0.0), context_overflow="slide"),
    ]
    with running(models, routers=PAGE_ROUTERS, static=STATIC) as found:
        yield found


def reply(http, model, messages=HELLO, **options):
    """Return (tokens, the event with `finished`, usage) of /api/reply."""
    prompt = {} if "text" in options else {"messages": messages}
    tokens, end, usage = [], None, None
    with http.stream("POST", "/api/reply", json={"model": model, **prompt, "max_tokens": 40, **options}) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            tokens += event.get("tokens", [])
            end = event if "finished" in event else end
            usage = event.get("usage", usage)
    return tokens, end, usage


def ids(tokens):
    return [token["id"] for token in tokens]


def text(tokens):
    return b"".join(bytes(token["bytes"]) for token in tokens).decode("utf-8", "replace")


def prompt_of(server, name, messages=HELLO):
    model = server.app.state.models[name]
    return encode_untrusted(messages, model.tokenizer, 3 * model.context // 4).ids


def test_the_page_is_served_without_inline_script_or_style(http):
    page = http.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "<style" not in page.text and " style=" not in page.text and " onclick" not in page.text
    assert page.text.count("<script") == page.text.count('<script type="module" src="/static/')


def test_files_of_the_page_are_asked_for_again_and_cannot_name_others(http):
    first = http.get("/static/app.js")
    assert first.headers["content-type"].startswith("text/javascript") and first.headers["cache-control"] == "no-cache"
    again = http.get("/static/app.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    assert http.head("/static/style.css").status_code == 200
    assert http.post("/static/app.js").status_code == 405
    for name in ("..%2findex.html", "../index.html", "%2e%2e/%2e%2e/app.py", "/etc/passwd", "", "nothing.js"):
        assert http.get(f"/static/{name}").status_code == 404, name


def test_small_responses_do_not_wait_for_acknowledgements(http, server):
    """Without TCP_NODELAY a response takes 40 ms."""
    http.get("/static/dom.js")
    connections = [each.transport.get_extra_info("socket") for each in server.server.server_state.connections]
    assert connections and all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in connections)


def test_the_page_is_small():
    total = sum(file.stat().st_size for file in STATIC.parent.rglob("*") if file.is_file())
    assert total < 200_000


def test_no_script_of_the_page_parses_html():
    for file in STATIC.glob("*.js"):
        source = file.read_text(encoding="utf-8")
        for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert name not in source, (file.name, name)


def test_reply_streams_what_chat_completions_returns(http, server):
    tokens, end, usage = reply(http, "cycle", temperature=0.0)
    whole = http.post(
        "/v1/chat/completions", json={"model": "cycle", "messages": HELLO, "temperature": 0.0, "max_tokens": 40}
    ).json()
    assert text(tokens) == whole["choices"][0]["message"]["content"]
    assert end["finished"] == "length" and end["bytes"] == 40
    assert usage["prompt_tokens"] == len(prompt_of(server, "cycle")) and usage["completion_tokens"] == 40


def test_tokens_have_probabilities_that_sum_to_at_most_one(http):
    tokens, _, _ = reply(http, "tokens", seed=3, top_logprobs=5)
    for token in tokens:
        assert len(token["top"]) == 5
        assert sum(math.exp(each["logprob"]) for each in token["top"]) <= 1 + 1e-6
        assert 0 <= token["entropy"] <= math.log(2**16)
        assert token["top"][0]["logprob"] >= token["logprob"] - 1e-9


@pytest.mark.parametrize("name", ["bytes", "tokens"])
def test_a_fork_at_the_sampled_token_repeats_the_reply(http, name):
    whole, _, _ = reply(http, name, seed=5, temperature=1.0)
    for cut in (1, 7, len(whole) - 2):
        rest, _, _ = reply(http, name, seed=5, temperature=1.0, reply=ids(whole)[:cut], max_tokens=40 - cut)
        assert ids(whole)[:cut] + ids(rest) == ids(whole)


def test_a_fork_continues_exactly_the_given_ids(http, server):
    model = server.app.state.models["bytes"]
    whole, _, _ = reply(http, "bytes", seed=5)
    other = next(each["id"] for each in whole[4]["top"] if each["id"] != whole[4]["id"])
    start = [*ids(whole)[:4], other]
    rest, _, _ = reply(http, "bytes", reply=start, temperature=0.0, max_tokens=1)
    with torch.inference_mode():
        logits = model.model(torch.tensor([[*prompt_of(server, "bytes"), *start]]))[0, -1]
    assert ids(rest) == [int(logits.argmax())]
    assert rest[0]["logprob"] == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-4)


def test_a_stop_sequence_can_begin_in_the_given_ids(http):
    # The model writes "\nuser: " again and again, which ends a turn over bytes.
    whole, end, _ = reply(http, "stops", temperature=0.0)
    assert end["finished"] == "stop" and "user" not in text(whole)
    start = list(b"ok\nuse")
    rest, end, _ = reply(http, "stops", temperature=0.0, reply=start)
    assert end["finished"] == "stop"
    assert rest == [] and end["bytes"] == 2


def test_given_ids_that_contain_a_stop_sequence_end_the_reply(http):
    rest, end, _ = reply(http, "stops", temperature=0.0, reply=list(b"ok\nuser: "))
    assert (rest, end["finished"], end["bytes"]) == ([], "stop", 2)


def test_text_is_continued_without_a_chat_template(http):
    tokens, end, usage = reply(http, "cycle", text="ab", temperature=0.0, max_tokens=10)
    assert text(tokens) == CYCLE[2:].encode()[:10].decode("utf-8", "replace")
    assert usage["prompt_tokens"] == 2 and end["finished"] == "length"


@pytest.mark.parametrize("name", ["bytes", "tokens"])
@pytest.mark.parametrize("length", [20, 150])
def test_tokens_of_a_reply_are_scored_as_when_it_was_generated(http, name, length):
    # 150 is past the context, of which the older half is dropped twice.
    whole, _, _ = reply(http, name, seed=2, max_tokens=length)
    scored = http.post("/api/tokens", json={"model": name, "messages": HELLO, "reply": ids(whole)}).json()["tokens"]
    assert ids(scored) == ids(whole)
    for before, after in zip(whole, scored, strict=True):
        assert after["logprob"] == pytest.approx(before["logprob"], abs=1e-4)
        assert after["entropy"] == pytest.approx(before["entropy"], abs=1e-4)
        assert after["token"] == before["token"] and ids(after["top"]) == ids(before["top"])


def test_tokens_of_a_forked_reply_are_scored_as_when_it_was_generated(http):
    whole, _, _ = reply(http, "bytes", seed=2, max_tokens=100)
    start = ids(whole)[:90]
    rest, _, _ = reply(http, "bytes", seed=3, max_tokens=60, reply=start)
    body = {"model": "bytes", "messages": HELLO, "reply": start + ids(rest), "started": 90}
    scored = http.post("/api/tokens", json=body).json()["tokens"]
    for before, after in zip([*whole[:90], *rest], scored, strict=True):
        assert after["logprob"] == pytest.approx(before["logprob"], abs=1e-4)


def test_tokens_past_the_context_have_no_score_where_the_window_slides(http):
    whole, _, _ = reply(http, "slide", seed=2, max_tokens=150)
    scored = http.post("/api/tokens", json={"model": "slide", "messages": HELLO, "reply": ids(whole)}).json()["tokens"]
    known = [after for after in scored if "logprob" in after]
    assert 0 < len(known) < 150
    for before, after in zip(whole, known, strict=False):
        assert after["logprob"] == pytest.approx(before["logprob"], abs=1e-4)


def test_attention_is_the_last_row_of_the_head(http, server):
    model = server.app.state.models["bytes"]
    context = [*prompt_of(server, "bytes"), 1, 2, 3]
    body = {"model": "bytes", "messages": HELLO, "reply": [1, 2, 3], "layer": 1, "head": 0}
    found = http.post("/api/attention", json=body).json()
    assert ids(found["tokens"]) == context and found["dropped"] == 0
    assert found["weights"] == pytest.approx(attention(model.model, context, 1, 0)[-1].tolist(), abs=1e-5)
    assert sum(found["weights"]) == pytest.approx(1, abs=1e-3)


def test_logit_lens_ends_with_what_the_model_predicts(http, server):
    model = server.app.state.models["tokens"]
    whole, _, _ = reply(http, "tokens", seed=1)
    body = {"model": "tokens", "messages": HELLO, "reply": ids(whole)[:6], "top": 4}
    layers = http.post("/api/logit_lens", json=body).json()["layers"]
    assert len(layers) == model.model.config.L
    assert ids(layers[-1]) == ids(whole[6]["top"])[:4]
    context = [*prompt_of(server, "tokens"), *ids(whole)[:6]]
    expected = logit_lens(model.model, context, len(context) - 1, 4)
    assert [ids(layer) for layer in layers] == [[i for i, _ in layer] for layer in expected]


def test_past_the_context_the_visible_part_is_shown(http, server):
    whole, _, _ = reply(http, "bytes", seed=2, max_tokens=150)
    body = {"model": "bytes", "messages": HELLO, "reply": ids(whole), "layer": 0, "head": 0}
    found = http.post("/api/attention", json=body).json()
    assert found["dropped"] > 0 and len(found["tokens"]) <= 96
    assert len(found["tokens"]) + found["dropped"] == len(prompt_of(server, "bytes")) + 150
    assert ids(found["tokens"])[-20:] == ids(whole)[-20:]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("reply", {"messages": HELLO, "text": "a"}, None),
        ("reply", {}, None),
        ("reply", {"text": ""}, "text"),
        ("reply", {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ("reply", {"messages": HELLO, "reply": [256]}, "reply"),
        ("reply", {"messages": HELLO, "reply": [-1]}, "reply.0"),
        ("reply", {"text": "\ud800"}, "text"),
        ("tokens", {"messages": HELLO, "reply": [1] * 9000}, "reply"),
        ("reply", {"messages": HELLO, "temperature": 9}, "temperature"),
        ("tokens", {"messages": HELLO}, "reply"),
        ("tokens", {"messages": HELLO, "reply": [1], "started": 2}, None),
        ("attention", {"messages": HELLO, "layer": 99, "head": 0}, "layer"),
        ("attention", {"messages": HELLO, "layer": 0, "head": 99}, "head"),
        ("logit_lens", {"messages": HELLO, "top": 0}, "top"),
        ("provenance", {"text": "what was trained on"}, "model"),
    ],
)
def test_bad_input_is_400_with_a_reason(http, path, body, param):
    content = json.dumps({"model": "bytes", **body})  # httpx encodes no lone surrogates
    response = http.post(f"/api/{path}", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"] and error["param"] == param


def test_an_unknown_model_is_404(http):
    for path in ("reply", "tokens", "provenance"):
        response = http.post(f"/api/{path}", json={"model": "../runs", "text": "a"})
        assert response.status_code == 404


def test_the_api_of_the_page_needs_the_key_but_the_page_does_not():
    models = [served("cycle", cycle_model())]
    with running(models, routers=PAGE_ROUTERS, static=STATIC, api_key="secret") as found, found.http() as http:
        assert http.get("/").status_code == 200
        assert http.get("/static/app.js").status_code == 200
        assert http.post("/api/reply", json={"model": "cycle", "text": "a"}).status_code == 401
        assert http.get("/static/../page_routes.py").status_code in (401, 404)
