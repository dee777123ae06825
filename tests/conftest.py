"""For all tests: no network, and no files outside temporary folders.

Property tests draw the same cases in every run. With NIELS_GPT_TEST_SEED=N they draw other cases, which N decides
(`make test WHAT=fresh`); the run prints N at its end.
"""

import gc
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from types import SimpleNamespace

# One thread: the models are tiny, and on a busy machine two OpenMP threads wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import is_hypothesis_test, seed, settings

from niels_gpt.system import private_files, program

TEST_SEED = os.environ.get("NIELS_GPT_TEST_SEED", "")
settings.register_profile("repo", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("fresh", deadline=None, derandomize=False, max_examples=100, database=None, print_blob=True)
settings.load_profile("fresh" if TEST_SEED else "repo")


def pytest_configure(config):
    # Before any import of `datasets`: use a temporary folder for its caches, and never connect to the Hub.
    config.hf_home = tempfile.mkdtemp(prefix="niels-gpt-tests-")
    os.environ.update(HF_HOME=config.hf_home, HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    os.environ["NIELS_GPT_NATIVE"] = f"{config.hf_home}/native"
    os.environ["XDG_CACHE_HOME"] = f"{config.hf_home}/cache"
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "NIELS_GPT_DATA"):
        os.environ.pop(name, None)


real_program = program.program
"""Returns how the tests themselves were started; see `printed_commands`."""


@pytest.fixture(autouse=True, scope="session")
def printed_commands():
    """Messages show commands that begin with `niels-gpt`, however the tests were started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "program", lambda: program.NAME)
        yield


@pytest.fixture(autouse=True)
def restored_umask(monkeypatch):
    """Set the usual umask: reading private files makes it stricter, also in fixtures of modules, which run before."""
    monkeypatch.setattr(private_files, "_denied_so_far", 0)
    os.umask(0o022)
    yield
    os.umask(0o022)


def pytest_terminal_summary(terminalreporter):
    if TEST_SEED:
        terminalreporter.write_line(f"property tests drew their cases with NIELS_GPT_TEST_SEED={TEST_SEED}")


def pytest_collection_modifyitems(items):
    """Mark property tests (`-m property`), and seed them if there is a seed."""
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("property")
            if TEST_SEED:
                seed(int(TEST_SEED))(getattr(item.obj, "__func__", item.obj))


def pytest_unconfigure(config):
    shutil.rmtree(config.hf_home, ignore_errors=True)


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Allow connections to this machine only."""
    connect, getaddrinfo = socket.socket.connect, socket.getaddrinfo
    local = {"localhost", "127.0.0.1", "::1", "0.0.0.0", "", None}

    def guarded_connect(self, address):
        if self.family != socket.AF_UNIX and address[0] not in local:
            raise OSError(f"a test tried to connect to {address}")
        return connect(self, address)

    def guarded_getaddrinfo(host, *args, **kwargs):
        if host not in local:
            raise socket.gaierror(f"a test tried to look up {host!r}")
        return getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
        yield


class Hub:
    """A fake Hub: serves `rows` (split -> texts) as real `datasets` objects, or raises `error`."""

    def __init__(self, load_local):
        self.load_local = load_local
        self.rows = {"train": [], "validation": [], "test": []}
        self.error = None
        self.calls = []

    def load_dataset(self, path, name=None, *args, split=None, streaming=False, **kwargs):
        import datasets

        if path in ("json", "parquet", "text"):  # local files, read by `datasets` itself
            return self.load_local(path, name, *args, split=split, streaming=streaming, **kwargs)
        self.calls.append((path, name))
        if self.error is not None:
            raise self.error
        features = datasets.Features({"text": datasets.Value("string")})
        tables = {
            key: datasets.Dataset.from_dict({"text": texts}, features=features) for key, texts in self.rows.items()
        }
        if streaming:
            tables = {key: value.to_iterable_dataset() for key, value in tables.items()}
        return datasets.DatasetDict(tables) if split is None else tables[split]


@pytest.fixture
def hub(monkeypatch):
    import datasets

    from niels_gpt.data.reading import hub as real

    fake = Hub(datasets.load_dataset)
    monkeypatch.setattr(datasets, "load_dataset", fake.load_dataset)
    # no pause between attempts
    monkeypatch.setattr(real, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    return fake


@pytest.fixture
def random_states():
    """Return a function that returns the states of all global generators."""
    import random

    import numpy as np
    import torch

    # Unusual seeds, so that reseeding a global generator changes its state.
    torch.manual_seed(876543210987)
    random.seed(876543210987)
    np.random.seed(87654321)

    def states():
        name, keys, *rest = np.random.get_state(legacy=True)
        return torch.get_rng_state().tolist(), random.getstate(), (name, keys.tolist(), *rest)

    return states


@pytest.fixture(autouse=True)
def onednn_stays_on():
    """After an unsupported bfloat16 matmul torch disables oneDNN, and float32 results round differently."""
    before = "torch" in sys.modules and sys.modules["torch"].backends.mkldnn.enabled
    yield
    if before:
        assert sys.modules["torch"].backends.mkldnn.enabled, "use device.bf16_autocast, which restores oneDNN"


@pytest.fixture(autouse=True)
def gpu_state(request):
    """Skip tests marked `gpu` without CUDA; run each with fresh caches, and restore torch's global state after it."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    workspace = os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    states = torch.get_rng_state(), torch.cuda.get_rng_state_all(), torch.get_default_dtype()
    _free_gpu()
    yield
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state_all(states[1])
    torch.set_default_dtype(states[2])
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic)
    torch.cuda.set_per_process_memory_fraction(1.0)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if workspace is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace
    _free_gpu()


@pytest.fixture
def cuda(gpu_state):
    """The GPU of a test marked `gpu`."""
    import torch

    return torch.device("cuda")


def _free_gpu():
    """Drop compiled code and the memory of dead objects: the next test must not depend on them."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def signals_not_ignored():
    """Use the signal handlers of a terminal, also under nohup or in the background."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def late_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine quick work takes more than two seconds: no progress lines among the output of tests."""
    monkeypatch.setattr("niels_gpt.system.progress.FIRST_LINE_AFTER", 60.0)
