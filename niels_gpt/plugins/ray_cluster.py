"""An executor on a Ray cluster (extra `ray`).

Small jobs are sent in groups as Ray tasks, large ones one by one. A task whose worker or node dies is run again; a task
only computes, so running it again changes nothing. Ray is imported when a cluster is opened.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.system.executors import Job, Result, itself

GROUP = 4
"""Jobs per task: a task of Ray costs about a millisecond, a job of a cache build 10 to 30."""
RETRIES = 8
"""How often a task is run again after its worker or node died."""
CONNECT_SECONDS = 10.0
REFRESH_SECONDS = 5.0
"""How often the CPUs of the cluster are counted: nodes may join and leave."""
_HOST_PORT = re.compile(r"(?:ray://)?\[?([^\]/]+?)\]?:(\d+)/?")


class RayExecutor:
    """Tasks on the CPUs of a Ray cluster. Use as a context manager: it connects, and disconnects at the end."""

    def __init__(
        self, address: str | None = None, *, same_versions: Sequence[str] = (), cpus: int | None = None
    ) -> None:
        """Connect to a cluster, or start one on this machine.

        address: HOST:PORT of a cluster that this machine is part of, ray://HOST:PORT, or auto; None: start one.
        same_versions: packages that decide about the results; a node with another version is refused.
        cpus: CPUs of a local cluster; None: all.
        """
        self._address, self._cpus = address, cpus
        self._versions = {name: _version(name) for name in same_versions}
        self._ray: Any = None
        self._counted = -REFRESH_SECONDS
        self._limit = 2
        self._nodes = 1
        self._pending = 0

    def __enter__(self) -> RayExecutor:
        """Raises ValueError if ray is not installed or already in use, ConnectionError if no cluster answers."""
        if importlib.util.find_spec("ray") is None:
            raise ValueError("--engine ray needs the package ray: pip install 'niels-gpt[ray]'")
        if self._address is not None:
            _check_answers(self._address)
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the first error of a job is raised; not all
        import ray

        if ray.is_initialized():
            raise ValueError("this process is already connected to a Ray cluster: disconnect it first (ray.shutdown)")
        if self._address is not None:
            _check_is_ray(self._address)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        if self._address is None:
            options |= {"num_cpus": self._cpus, "include_dashboard": False}
        else:  # the nodes run this version of the code, whatever is installed there
            package = str(Path(__file__).parents[1])
            options |= {"address": self._address, "runtime_env": {"py_modules": [package], "excludes": ["__pycache__"]}}
        try:
            ray.init(**options)
        except Exception as err:  # ConnectionError, RuntimeError, grpc errors and others
            with contextlib.suppress(Exception):
                ray.shutdown()
            where = f"the Ray cluster at {self._address}" if self._address else "a local Ray cluster"
            if re.search("Unauthenticated|InvalidAuthToken", str(err)):
                raise ConnectionError(f"{where} {_token_remedy(bool(_token()))}") from err
            raise ConnectionError(f"cannot use {where}: {_first_line(err)}{_address_remedy(self._address)}") from err
        self._ray = ray
        self._max_pending()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ray is not None:
            self._ray.shutdown()
            self._ray = None

    def status(self) -> str:
        """Nodes, CPUs and tasks in flight."""
        if self._ray is None:
            return ""
        counts = {"node": self._nodes, "CPU": self._limit // 2, "task": self._pending}
        return ", ".join(f"{number} {name}{'s' * (number != 1)}" for name, number in counts.items()) + " in flight"

    def _max_pending(self) -> int:
        """Most tasks in flight: two per CPU of the cluster, so that no CPU waits for the driver."""
        now = time.monotonic()
        if now - self._counted >= REFRESH_SECONDS:
            self._counted = now
            with contextlib.suppress(Exception):  # a cluster that is being repaired; the last numbers stay
                resources = self._ray.cluster_resources()
                self._limit = max(2 * int(resources.get("CPU", 1)), 2)
                self._nodes = sum(node["Alive"] for node in self._ray.nodes())
        return self._limit

    def in_order(
        self, jobs: Iterable[Job], work: Callable[[Any], Result], argument: Callable[[Job], Any] = itself
    ) -> Iterator[tuple[Job, Result]]:
        """As `Executor.in_order`; `work`, its argument and its result must be picklable.

        Raises what `work` raises, ValueError for a node with other versions of packages, and ConnectionError if the
        cluster is lost or a task fails however often it is run.
        """
        # The function is pickled once and cached by each worker process, with the tokenizer that it holds.
        task = self._task(lambda arguments: [work(argument) for argument in arguments])
        source = iter(jobs)
        groups = iter(lambda: list(itertools.islice(source, GROUP)), [])
        started = ((group, [self._start(task, [argument(job) for job in group])]) for group in groups)
        with contextlib.closing(self._results(started)) as found:  # type: ignore[type-var]
            for group, results in found:
                yield from zip(group, results, strict=True)

    def in_pieces(
        self, jobs: Iterable[Job], work: Callable[[Job], Iterator[Result]], pieces: Callable[[Job], int]
    ) -> Iterator[tuple[Job, Result]]:
        """As `Executor.in_pieces`: one task per job; its pieces are objects on its node until they are used here.

        Raises as `in_order` does.
        """

        def all_pieces(job: Job) -> Iterator[Result]:
            yield from work(job)

        several, single = self._task(all_pieces), self._task(lambda job: next(work(job)))

        def start(job: Job) -> list[Any]:
            number = pieces(job)
            return [self._start(single, job)] if number == 1 else self._start(several.options(num_returns=number), job)

        return self._results((job, start(job)) for job in jobs)

    def on_each_node(self, work: Callable[[Any], Result], argument: Any) -> list[Result]:
        """As `Executor.on_each_node`, on all nodes that have CPUs. Raises as `in_order` does."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        task = self._task(work, cpus=0)
        with self._errors():
            here = self._ray.put(argument)
            nodes = [node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
            places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
            return list(self._ray.get([task.options(scheduling_strategy=place).remote(here) for place in places]))

    def _task(self, work: Callable[[Any], Any], *, cpus: int = 1) -> Any:
        """A function as a task of Ray."""
        assert self._ray is not None, "RayExecutor is a context manager"
        return self._ray.remote(max_retries=RETRIES, num_cpus=cpus)(_on_node(work, self._versions))

    def _start(self, task: Any, argument: Any) -> Any:
        with self._errors():
            return task.remote(argument)

    def _results(self, started: Iterable[tuple[Job, list[Any]]]) -> Iterator[tuple[Job, Any]]:
        """Yield (job, result) for each reference of each job, in their order; a bounded number of jobs is in flight."""
        pending: collections.deque[tuple[Job, collections.deque[Any]]] = collections.deque()

        def first() -> Iterator[tuple[Job, Any]]:
            job, references = pending.popleft()
            while references:
                with self._errors():
                    result = self._ray.get(references[0])
                references.popleft()  # frees the result in the object store before the caller uses it
                yield job, result
            self._pending = len(pending)

        try:
            for job, references in started:
                pending.append((job, collections.deque(references)))
                del references
                self._pending = len(pending)
                if len(pending) > self._max_pending():
                    yield from first()
            while pending:
                yield from first()
        finally:
            for _, left in pending:
                with contextlib.suppress(Exception):
                    self._ray.cancel(left[0], force=False)
            self._pending = 0

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise the error of a job as it is, and a failure of the cluster as ConnectionError."""
        from ray import exceptions

        try:
            yield
        except exceptions.RayTaskError as err:
            raise (err.cause if isinstance(err.cause, Exception) else err) from None
        except exceptions.RayError as err:
            what = (
                f"a task was lost {RETRIES + 1} times" if isinstance(err, _lost(exceptions)) else "the cluster failed"
            )
            raise ConnectionError(f"Ray: {what} ({type(err).__name__}: {_first_line(err)}); {_RESUME}") from err
        except (RuntimeError, ConnectionError, TimeoutError) as err:  # the connection of a Ray client
            raise ConnectionError(f"Ray: the cluster does not answer ({_first_line(err)}); {_RESUME}") from err


_RESUME = "run the same command again: it resumes from the last complete shard"


def _lost(exceptions: Any) -> tuple[type[BaseException], ...]:
    names = ("WorkerCrashedError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError")
    return tuple(getattr(exceptions, name) for name in names if hasattr(exceptions, name))


def _on_node(work: Callable[[Any], Result], versions: dict[str, str]) -> Callable[[Any], Result]:
    """The function of a task: `work`, on a node with these versions of packages."""

    def run(argument: Any) -> Result:
        for name, wanted in versions.items():
            if (found := _version(name)) != wanted:
                raise ValueError(
                    f"the node {socket.gethostname()} has {name} {found}, but this machine has {wanted}; other "
                    "versions may encode differently: install the same version on all nodes"
                )
        return work(argument)

    return run


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _check_answers(address: str) -> None:
    """Raise ValueError for an address of no known form, ConnectionError if nothing listens there."""
    if address == "auto":
        return
    match = _HOST_PORT.fullmatch(address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError(f"--address is {address!r}: use HOST:PORT, ray://HOST:PORT, or auto")
    try:
        socket.create_connection((match[1], int(match[2])), timeout=CONNECT_SECONDS).close()
    except OSError as err:
        reason = "no answer" if isinstance(err, TimeoutError) else err.strerror or str(err)
        raise ConnectionError(f"no Ray cluster answers at {address}: {reason}{_address_remedy(address)}") from err


def _check_is_ray(address: str) -> None:
    """Raise ConnectionError if what listens at an address is no Ray cluster, or wants another token.

    Ray itself would wait for minutes. The call is the first one that Ray makes, sent without its generated code.
    """
    import grpc

    is_client = address.startswith("ray://")
    target = _local_address() if address == "auto" else address.removeprefix("ray://").rstrip("/")
    if target is None:
        return
    method = "/ray.rpc.RayletDriver/ClusterInfo" if is_client else "/ray.rpc.NodeInfoGcsService/CheckAlive"
    token = _token()
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=CONNECT_SECONDS, metadata=token)
            return
        except grpc.RpcError as err:
            code = err.code()
    if code is grpc.StatusCode.UNAUTHENTICATED:
        raise ConnectionError(f"the Ray cluster at {address} {_token_remedy(bool(token))}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        other = (
            "drop ray://, or use the port of Ray's client server (10001)"
            if is_client
            else ("use the port of `ray start --head` (6379), or ray://HOST:PORT for that of Ray's client server")
        )
        raise ConnectionError(f"no Ray cluster answers at {address}: another service uses this port; {other}")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) and address != "auto":
        raise ConnectionError(
            f"no Ray cluster answers at {address}: something listens there, but it is not Ray{_address_remedy(address)}"
        )


def _local_address() -> str | None:
    """HOST:PORT of the cluster that `auto` means; None if Ray has to find it."""
    given = os.environ.get("RAY_ADDRESS", "")
    if given:
        return given if _HOST_PORT.fullmatch(given) and "://" not in given else None
    try:
        from ray._private.utils import read_ray_address

        return str(found) if (found := read_ray_address()) else None
    except Exception:  # a private function; Ray reports what is wrong with the address
        return None


def _token() -> tuple[tuple[str, str], ...]:
    """The token that Ray sends with each call, as metadata of gRPC."""
    try:
        from ray._private.authentication import authentication_utils
        from ray._private.authentication.grpc_authentication_client_interceptor import (
            _get_authentication_metadata_tuple,
        )

        if authentication_utils.is_token_auth_enabled():
            return tuple(_get_authentication_metadata_tuple())
    except ImportError:  # a Ray without tokens
        pass
    except Exception as err:
        raise ConnectionError(f"cannot read the token of the Ray cluster: {_first_line(err)}") from None
    return ()


def _token_remedy(was_sent: bool) -> str:
    if was_sent:
        return "refuses the token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token of its head node"
    return (
        "wants a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token of its head "
        "node (default: ~/.ray/auth_token)"
    )


def _address_remedy(address: str | None) -> str:
    if address is None:
        return ""
    if address == "auto":
        return "; start one with `ray start --head`, or omit --address to use this machine alone"
    return "; check it with `ray status --address HOST:PORT`, or omit --address to use this machine alone"


def _first_line(err: BaseException) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0].rstrip(". ")
