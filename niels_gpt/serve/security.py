"""Who may use the server: the addresses it binds to, the API key, and requests from pages of other sites."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from niels_gpt.serve.errors import APIError, HTTPMiddleware

KEY_VARIABLE = "NIELS_GPT_API_KEY"
RESPONSE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
OPEN_PATHS = frozenset({"/health", "/"})
"""Paths that need no key: a browser cannot send one when it opens a page."""
OPEN_PREFIX = "/static/"
HEAD_BYTES = 32 * 1024
"""Longest request line with headers."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a host to bind to. Raises ValueError for an unknown name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ValueError(
            f"--host {host}: there is no such host; use 127.0.0.1, or an address of this machine"
        ) from None
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def check_key(host: str, key: str | None) -> None:
    """Raise ValueError for a key that no header can hold, and for an address without one that others can reach."""
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ValueError("the API key must consist of printable ASCII characters without spaces")
    if key is None and not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached by other machines: set an API key (--api-key KEY, or the environment "
            f"variable {KEY_VARIABLE}, which no list of processes shows), or use --host 127.0.0.1"
        )


def check_origin(origin: str) -> str:
    """Return the origin of an option as browsers send it. Raises ValueError if it is not an origin, such as *."""
    netloc = urlsplit_netloc(origin)
    scheme = origin.partition("://")[0]
    if netloc is None or origin.rstrip("/") != f"{scheme}://{netloc}" or "@" in netloc or "*" in netloc:
        raise ValueError(
            f"--allow-origin {origin}: give one site as browsers name it, such as https://example.org or "
            "http://localhost:3000; repeat the option for more"
        )
    return f"{scheme}://{netloc}".lower()


def check_host(host: str) -> str:
    """Return the name of an option as it is compared with Host headers. Raises ValueError if it is not a host name."""
    name = _host_name(host)
    if not name or host.lower() not in (name, f"[{name}]") or set(name) & set("/*@ "):
        raise ValueError(
            f"--allow-host {host}: give a name without scheme and port, such as host.docker.internal; repeat the "
            "option for more"
        )
    return name


class Guard(HTTPMiddleware):
    """ASGI middleware that refuses what must not reach the app, and adds the security headers to every response.

    On a loopback address only local names and `hosts` are allowed in the Host header: otherwise a page of another site
    could reach the server through a name that it lets point to 127.0.0.1 (DNS rebinding). `hosts` also restrict the
    names on other addresses. A request with the Origin of another site is refused as well, unless it is one of
    `origins`: a browser would send the request and only hide the response. To `origins`, responses have the headers of
    CORS, and preflight requests, which have no key, are answered.
    """

    def __init__(
        self, app: ASGIApp, *, key: str | None, local: bool, origins: Collection[str] = (), hosts: Collection[str] = ()
    ) -> None:
        super().__init__(app)
        self._key = None if key is None else key.encode("ascii")
        self._checks_host = local or bool(hosts)
        self._origins = frozenset(origins)
        self._hosts = frozenset(hosts)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        from_allowed = origin in self._origins

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = MutableHeaders(scope=message)
                for name, value in RESPONSE_HEADERS.items():
                    added.setdefault(name, value)
                if self._origins:
                    added.add_vary_header("Origin")
                if from_allowed:
                    added["access-control-allow-origin"] = origin
                    added["access-control-expose-headers"] = "*"
            await send(message)

        preflight = from_allowed and scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        err = self._refusal(scope, headers, needs_key=not preflight)
        if err is not None:
            await err.send(send_with_headers)
        elif preflight:
            allowed = {
                "access-control-allow-methods": "GET, HEAD, POST",
                "access-control-allow-headers": headers.get("access-control-request-headers", ""),
                "access-control-max-age": "600",
            }
            await Response(status_code=204, headers=allowed)(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, headers: Headers, *, needs_key: bool) -> APIError | None:
        path = scope["path"]
        line = len(scope["raw_path"]) + len(scope["query_string"])
        if line + sum(len(name) + len(value) for name, value in headers.raw) > HEAD_BYTES:
            return headers_too_large()
        host = _host_name(headers.get("host", ""))
        if self._checks_host and not _is_local_name(host) and host not in self._hosts:
            return APIError(
                403,
                "the Host header must be localhost, a loopback address (127.0.0.1, [::1]), or a name that the server "
                "was started with (--allow-host)",
                code="wrong_host",
            )
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and urlsplit_netloc(origin) != headers.get("host", ""):
            return APIError(
                403,
                "requests from pages of other sites are refused; the server can allow a site (--allow-origin)",
                code="wrong_origin",
            )
        if not needs_key or self._key is None or path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._key):
            return None
        return APIError(
            401,
            "the API key is missing or wrong: send the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def headers_too_large() -> APIError:
    """Return the error of a request line and headers above HEAD_BYTES."""
    return APIError(431, f"the headers have more than {HEAD_BYTES} bytes", code="headers_too_large")


def _host_name(header: str) -> str:
    """Return the name in a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def _is_local_name(host: str) -> bool:
    """Whether the name in a Host header is that of this machine: no other site can let an address point elsewhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def urlsplit_netloc(origin: str) -> str | None:
    """Return host and port of an Origin header; None if it has none ("null") or is malformed."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None
