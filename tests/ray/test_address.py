"""Services at --address that are no Ray cluster, or one that wants a token: one line, soon."""

import contextlib
import http.server
import socket
import threading
import time
from concurrent import futures

import pytest

from niels_gpt.plugins import ray_cluster
from niels_gpt.plugins.ray_cluster import RayExecutor

pytest.importorskip("ray")
grpc = pytest.importorskip("grpc")


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web_server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def silent_server():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@contextlib.contextmanager
def grpc_server(code):
    """A gRPC server that answers every call with a status; a list receives the metadata of the calls."""
    seen = []

    class Refuse(grpc.GenericRpcHandler):
        def service(self, details):
            def answer(request, context):
                seen.append(dict(context.invocation_metadata()))
                context.abort(code, "InvalidAuthToken: Authentication token is missing or incorrect")

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[Refuse()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port, seen
    server.stop(None).wait()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(ray_cluster, "CONNECT_SECONDS", 1.0)


@pytest.mark.parametrize("protocol", ["", "ray://"])
@pytest.mark.parametrize("service", [web_server, silent_server])
def test_another_service_is_not_taken_for_ray(service, protocol, capfd):
    with service() as port:
        began = time.monotonic()
        with pytest.raises(ConnectionError, match=rf"at {protocol}127.0.0.1:{port}: .* it is not Ray") as caught:
            RayExecutor(f"{protocol}127.0.0.1:{port}").__enter__()
        assert time.monotonic() - began < 20
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("protocol", ["", "ray://"])
def test_another_grpc_service_is_named(protocol):
    with (
        grpc_server(grpc.StatusCode.UNIMPLEMENTED) as (port, _),
        pytest.raises(ConnectionError, match="another service uses this port"),
    ):
        RayExecutor(f"{protocol}127.0.0.1:{port}").__enter__()


@pytest.mark.parametrize("protocol", ["", "ray://"])
def test_a_token_that_is_missing_or_wrong_is_named(protocol, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_token", tuple)
    with grpc_server(grpc.StatusCode.UNAUTHENTICATED) as (port, seen):
        with pytest.raises(ConnectionError, match="wants a token: set RAY_AUTH_MODE=token"):
            RayExecutor(f"{protocol}127.0.0.1:{port}").__enter__()
        monkeypatch.setattr(ray_cluster, "_token", lambda: (("authorization", "Bearer mine"),))
        with pytest.raises(ConnectionError, match="refuses the token: set RAY_AUTH_TOKEN"):
            RayExecutor(f"{protocol}127.0.0.1:{port}").__enter__()
    assert [call.get("authorization") for call in seen] == [None, "Bearer mine"]
