"""Keys, hosts, origins and headers."""

import httpx
import pytest

from niels_gpt.serve.security import HEAD_BYTES, check_host, check_key, check_origin, is_loopback
from tests.serve.conftest import cycle_model, running, served

PATHS = ("/v1/models", "/metrics", "/openapi.json", "/v1/models/cycle", "/nothing")


@pytest.fixture(scope="module")
def guarded():
    with running([served("cycle", cycle_model())], api_key="secret-key") as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "secret-key",
        "Bearer",
        "Bearer secret",
        "Basic secret-key",
        "Bearer secret-key2",
        "Bearer é",
    ],
)
def test_every_path_needs_the_key(guarded, path, value):
    headers = {} if value is None else {"Authorization": value.encode("latin-1")}
    response = httpx.get(guarded.url + path, headers=headers)
    assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    allowed = httpx.get(guarded.url + path, headers={"Authorization": "Bearer secret-key"})
    assert allowed.status_code == (404 if path == "/nothing" else 200)


def test_the_client_with_a_key(guarded):
    with guarded.client("secret-key") as client:
        assert client.models.list().data[0].id == "cycle"
    assert httpx.get(guarded.url + "/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "",
        "10.0.0.1",
        "127.0.0.1x",
        "[::]",
        "0.0.0.0",
    ],
)
def test_other_names_are_refused(http, host):
    response = http.get("/v1/models", headers={"Host": host})
    assert response.status_code == 403 and response.json()["error"]["code"] == "wrong_host"


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1:9", "[::1]:8000", "LOCALHOST", "127.0.0.2:8000"]
)
def test_local_names_are_allowed(http, host):
    assert http.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost.evil.example", "http://[", "x"])
def test_pages_of_other_sites_are_refused(http, origin):
    body = {"model": "bytes", "prompt": "x"}
    response = http.post("/v1/completions", json=body, headers={"Origin": origin})
    assert response.status_code == 403 and response.json()["error"]["code"] == "wrong_origin"
    assert not any(name.startswith("access-control") for name in response.headers)


def test_the_page_of_the_server_is_allowed(server, http):
    assert http.get("/v1/models", headers={"Origin": server.url}).status_code == 200


SITES = {"origins": ["https://app.example", "http://localhost:3000"], "hosts": ["host.docker.internal", "fd00::1"]}


@pytest.fixture(scope="module")
def shared():
    """A server that two sites may use, under two more names."""
    with running([served("cycle", cycle_model())], api_key="secret-key", **SITES) as server:
        yield server


@pytest.mark.parametrize("origin", SITES["origins"])
def test_pages_of_allowed_sites(shared, origin):
    """What a browser sends: a preflight request without the key, then the request; both answers name the site."""
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(
        shared.url + "/v1/completions",
        headers={**asked, "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"},
    )
    assert preflight.status_code == 204 and not preflight.content
    assert preflight.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-os"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    body = {"model": "cycle", "prompt": " ", "max_tokens": 1}
    for key, status in (("secret-key", 200), ("wrong", 401)):
        headers = {"Origin": origin, "Authorization": f"Bearer {key}"}
        response = httpx.post(shared.url + "/v1/completions", json=body, headers=headers)
        assert response.status_code == status
        for each in (preflight, response):
            assert each.headers["access-control-allow-origin"] == origin and "Origin" in each.headers["vary"]
            assert "access-control-allow-credentials" not in each.headers
    assert httpx.options(shared.url + "/v1/completions", headers={"Origin": origin}).status_code == 401  # no preflight


@pytest.mark.parametrize("origin", ["https://evil.example", "http://app.example", "http://localhost:3001", "null", "*"])
@pytest.mark.parametrize("method", ["OPTIONS", "POST"])
def test_other_sites_are_refused_beside_allowed_ones(shared, origin, method):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Authorization": "Bearer secret-key"}
    response = httpx.request(method, shared.url + "/v1/completions", json={}, headers=headers)
    assert response.status_code == 403 and response.json()["error"]["code"] == "wrong_origin"
    assert not any(name.startswith("access-control") for name in response.headers)


def test_allowed_names(shared):
    key = {"Authorization": "Bearer secret-key"}
    for host in ("host.docker.internal", "HOST.docker.internal:8000", "[fd00::1]:80", "[FD00::1]", "localhost"):
        assert httpx.get(shared.url + "/v1/models", headers={**key, "Host": host}).status_code == 200
    for host in ("docker.internal", "x.host.docker.internal", "fd00::2", "app.example"):
        response = httpx.get(shared.url + "/v1/models", headers={**key, "Host": host})
        assert response.status_code == 403 and response.json()["error"]["code"] == "wrong_host"


def test_on_other_addresses_names_are_checked_only_if_some_are_allowed():
    for hosts, status in (((), 200), (("a.example",), 403)):
        with running([served("cycle", cycle_model())], local=False, hosts=hosts) as server:
            assert httpx.get(server.url + "/health", headers={"Host": "b.example"}).status_code == status


@pytest.mark.parametrize("path", ["/health?{}", "/{}", "/%61{}"])
def test_the_request_line_counts_for_the_limit_of_headers(http, path):
    """The parser counts only headers that are incomplete, in slices of 4096 bytes."""
    for size, expected in ((2000, (200, 404)), (4000, (431,))):
        response = http.get(path.format("a" * size), headers={"X": "y" * (HEAD_BYTES - 3000)})
        assert response.status_code in expected


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("https://App.Example", "https://app.example"),
        ("http://localhost:3000/", "http://localhost:3000"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)
def test_origins_as_browsers_send_them(given, origin):
    assert check_origin(given) == origin


@pytest.mark.parametrize(
    "value", ["*", "", "null", "app.example", "https://", "https://a/b", "https://u@a", "https://*.a"]
)
def test_what_is_no_origin(value):
    with pytest.raises(ValueError, match="--allow-origin") as caught:
        check_origin(value)
    assert value in str(caught.value)


def test_names_of_hosts():
    assert [check_host(name) for name in ("Pc.local", "[FD00::1]", "10.0.0.7")] == ["pc.local", "fd00::1", "10.0.0.7"]
    for value in ("", "*", "*.example", "a.example:80", "http://a.example", "a/b", "[::1]:80", "a b"):
        with pytest.raises(ValueError, match="--allow-host"):
            check_host(value)


def test_every_response_has_the_security_headers(http):
    for path in ("/v1/models", "/nothing", "/health"):
        headers = http.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe-inline" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "server" not in headers


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "192.168.1.4")),
    ],
)
def test_which_addresses_need_a_key(host, local):
    assert is_loopback(host) is local
    check_key(host, "k")
    if local:
        check_key(host, None)
    else:
        with pytest.raises(ValueError, match="NIELS_GPT_API_KEY"):
            check_key(host, None)


@pytest.mark.parametrize("key", ["", "a b", "é", "a\n"])
def test_keys_that_no_header_can_hold(key):
    with pytest.raises(ValueError, match="API key"):
        check_key("127.0.0.1", key)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "", "a b", "x" * 300])
def test_unknown_hosts(host):
    with pytest.raises(ValueError, match="no such host"):
        is_loopback(host)


def test_static_files_and_further_routes(tmp_path):
    from fastapi import APIRouter

    (tmp_path / "page.js").write_text("1", encoding="utf-8")
    (tmp_path.parent / "private.txt").write_text("private", encoding="utf-8")
    router = APIRouter()

    @router.get("/extra")
    async def extra():
        return {"fine": True}

    with running([served("cycle", cycle_model())], api_key="k", routers=[router], static=tmp_path) as server:
        assert httpx.get(server.url + "/static/page.js").text == "1"
        for path in ("/static/../private.txt", "/static/%2e%2e/private.txt", "/static//etc/passwd", "/static/"):
            assert httpx.get(server.url + path).status_code in (401, 404)
        assert httpx.get(server.url + "/extra").status_code == 401
        assert httpx.get(server.url + "/extra", headers={"Authorization": "Bearer k"}).json() == {"fine": True}
