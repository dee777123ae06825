"""A local HTTP server that speaks enough of the Hugging Face Hub's API to stream and download datasets, with faults.

The real `huggingface_hub`, `datasets` and fsspec read from it if HF_ENDPOINT is its address.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

Commit = dict[str, bytes]  # path in the repository -> content


@dataclass
class Fault:
    """What goes wrong with the requests whose "METHOD path" matches `pattern`."""

    pattern: str
    kind: str
    """status, cut (the connection is reset in mid-body), short (Content-Length is too small, and the body ends there),
    long (Content-Length is too large), slow (a pause after each block), or call (`action` runs, then the answer)."""
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)
    skip: int = 0
    """Matching requests that are answered correctly first."""
    times: int = 1
    """Matching requests that fail; -1: all."""
    fraction: float = 0.5
    """How much of the body is sent."""
    pause: float = 0.05
    """Seconds between the blocks of a slow body."""
    action: Callable[[], None] | None = None

    def strikes(self, request: str) -> bool:
        """Whether it applies to this request; counts it."""
        if self.times == 0 or not re.search(self.pattern, request):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        return True


class HubServer:
    """Serves datasets and models (id -> commits, the last is `main`) until it is closed; use as a context manager."""

    def __init__(self) -> None:
        self.repositories: dict[str, list[Commit]] = {}
        self.moved: dict[str, str] = {}
        """Old id -> id to which requests for it are redirected."""
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        """"METHOD path [range]" of all requests."""
        self.struck: list[str] = []
        """The requests that met a fault."""
        self.lock = threading.Lock()
        handler = type("BoundHandler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # a client that was killed
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def commit(self, dataset_id: str, files: Commit) -> str:
        """Add a commit with these files to `main`; return its sha."""
        commits = self.repositories.setdefault(dataset_id, [])
        commits.append(dict(files))
        return self.sha(dataset_id, len(commits) - 1)

    def sha(self, dataset_id: str, number: int = -1) -> str:
        """Return the sha of a commit."""
        commits = self.repositories[dataset_id]
        number %= len(commits)
        content = sorted((path, hashlib.sha1(data).hexdigest()) for path, data in commits[number].items())
        return hashlib.sha1(repr((dataset_id, number, content)).encode()).hexdigest()

    def find(self, dataset_id: str, revision: str) -> tuple[str, Commit] | None:
        """Return (sha, files) of a branch or commit."""
        commits = self.repositories.get(dataset_id, [])
        for number in reversed(range(len(commits))):
            sha = self.sha(dataset_id, number)
            if revision in ("main", sha):
                return sha, commits[number]
        return None

    def fault_for(self, request: str) -> Fault | None:
        """Return the fault that this request meets."""
        with self.lock:
            for fault in self.faults:
                if fault.strikes(request):
                    self.struck.append(request)
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = f"{self.command} {unquote(self.path)} {self.headers.get('Range') or ''}".rstrip()
        self.hub.requests.append(request)
        self.fault = self.hub.fault_for(request)
        if self.fault is not None and self.fault.action is not None:
            self.fault.action()
        if self.fault is not None and self.fault.kind == "status":
            self._send(self.fault.status, b"out of order", self.fault.headers)
            return
        path = unquote(urlsplit(self.path).path)
        for old, new in self.hub.moved.items():
            moved = re.fullmatch(
                f"(/api)?/datasets/{re.escape(old)}((?:/(?:tree|paths-info|revision|resolve)/.*)?)", path
            )
            if moved:
                self._send(307, b"", {"Location": f"{moved[1] or ''}/datasets/{new}{moved[2]}"})
                return
        for pattern, answer in (
            (r"/api/(?:datasets|models)/(.+?)/tree/([^/]+)(?:/(.*))?", self._tree),
            (r"/api/(?:datasets|models)/(.+?)/paths-info/([^/]+)", lambda *at: self._paths_info(*at, body=body)),
            (r"/api/(?:datasets|models)/(.+?)/revision/([^/]+)", self._info),
            (r"/api/(?:datasets|models)/(.+)", lambda repository: self._info(repository, "main")),
            (r"(?:/datasets)?/(.+?)/resolve/([^/]+)/(.+)", self._file),
        ):
            found = re.fullmatch(pattern, path)
            if found:
                answer(*found.groups())
                return
        self._missing("EntryNotFound", path)

    def _info(self, dataset_id: str, revision: str) -> None:
        commit = self.hub.find(dataset_id, revision)
        if commit is None:
            self._missing("RevisionNotFound" if dataset_id in self.hub.repositories else "RepoNotFound", dataset_id)
            return
        sha, files = commit
        when = "2024-01-01T00:00:00.000Z"
        about = {"_id": sha[:24], "id": dataset_id, "sha": sha, "lastModified": when, "createdAt": when}
        state = {"private": False, "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        self._json({**about, **state, "siblings": [{"rfilename": path} for path in files]})

    def _tree(self, dataset_id: str, revision: str, folder: str | None) -> None:
        commit = self.hub.find(dataset_id, revision)
        if commit is None:
            self._missing("RepoNotFound", dataset_id)
            return
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = [entry for entry in _entries(commit[1]) if _below(entry["path"], folder or "", recursive=recursive)]
        if folder and not entries:
            self._missing("EntryNotFound", folder)
        else:
            self._json(entries)

    def _paths_info(self, dataset_id: str, revision: str, *, body: bytes) -> None:
        commit = self.hub.find(dataset_id, revision)
        if commit is None:
            self._missing("RepoNotFound", dataset_id)
            return
        if "json" in (self.headers.get("Content-Type") or ""):
            wanted = json.loads(body)["paths"]
        else:
            wanted = parse_qs(body.decode())["paths"]
        wanted = [wanted] if isinstance(wanted, str) else wanted
        self._json([entry for entry in _entries(commit[1]) if entry["path"] in wanted])

    def _file(self, dataset_id: str, revision: str, path: str) -> None:
        commit = self.hub.find(dataset_id, revision)
        if commit is None or path not in commit[1]:
            self._missing("EntryNotFound" if commit else "RevisionNotFound", path)
            return
        sha, data = commit[0], commit[1][path]
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if span is None:
            self._send(200, data, headers)
            return
        first, last = int(span[1]), min(int(span[2] or len(data) - 1), len(data) - 1)
        if first > last:
            self._send(416, b"", headers | {"Content-Range": f"bytes */{len(data)}"})
            return
        self._send(206, data[first : last + 1], headers | {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _missing(self, code: str, what: str) -> None:
        self._send(404, b"not found", {"X-Error-Code": code, "X-Error-Message": f"{what} not found"})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        kind = self.fault.kind if self.fault is not None else ""
        sent = body[: int(len(body) * self.fault.fraction)] if self.fault and kind in ("cut", "short") else body
        length = {"short": len(sent), "long": len(body) + 1000}.get(kind, len(body))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault is not None and kind == "slow":
            for start in range(0, len(sent), 4096):
                self.wfile.write(sent[start : start + 4096])
                time.sleep(self.fault.pause)
            return
        self.wfile.write(sent)
        if kind == "cut":  # linger 0: a reset, not an orderly end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if kind in ("cut", "long"):
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR) if kind == "long" else self.connection.close()


def _entries(files: Commit) -> list[dict[str, object]]:
    folders = {"/".join(path.split("/")[:depth]) for path in files for depth in range(1, path.count("/") + 1)}
    entries: list[dict[str, object]] = [
        {"type": "directory", "oid": hashlib.sha1(folder.encode()).hexdigest(), "size": 0, "path": folder}
        for folder in sorted(folders)
    ]
    for path, data in files.items():
        entries.append({"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": path})
    return entries


def _below(path: object, folder: str, *, recursive: bool) -> bool:
    """Whether a path lies in a folder, or anywhere below it."""
    rest = str(path).removeprefix(f"{folder}/") if folder else str(path)
    return (not folder or rest != path) and (recursive or "/" not in rest)
