"""Requests generated from the OpenAPI schema find no 5xx."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from niels_gpt.serve.page_routes import PAGE_ROUTERS
from tests.serve.conftest import LIMITS, cycle_model, running, served

POSTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/api/reply",
    "/api/tokens",
    "/api/attention",
    "/api/logit_lens",
    "/api/provenance",
)
GETS = ("/v1/models", "/v1/models/{model_id}", "/health", "/metrics")


@pytest.fixture(scope="module")
def small():
    """A server with one model, named `x`, so that generated names sometimes hit it."""
    with running([served("x", cycle_model(T=32))], LIMITS, routers=PAGE_ROUTERS) as server:
        yield server


@pytest.fixture(scope="module")
def schema(small):
    return schemathesis.openapi.from_url(small.url + "/openapi.json")


def use_the_model(body):
    """Most generated names of models are unknown: let the model be found, so that the rest of the body is used."""
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = "x"
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(name), int) and body[name] > 8:
                body[name] = 8


VALID, INVALID = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [*(("POST", path, mode) for path in POSTS for mode in (VALID, INVALID)), *(("GET", path, VALID) for path in GETS)],
)
def test_no_request_of_the_schema_fails(schema, method, path, mode):

    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=100 if method == "POST" else 20, suppress_health_check=list(HealthCheck))
    def check(case):
        if len(str(case.body)) % 4:
            use_the_model(case.body)
        response = case.call(timeout=60)
        assert response.status_code < 500, (case.body, response.text)
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()


def test_the_schema_has_all_paths(small):
    with small.http() as http:
        found = http.get("/openapi.json").json()
    assert {*POSTS, *GETS} == set(found["paths"])
    assert "Error" in found["components"]["schemas"]
