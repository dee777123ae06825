"""`niels-gpt serve` as a process: its options, several models, signals."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

import niels_gpt
from niels_gpt.serve import server
from tests.cli import call
from tests.serve.test_served_model import write_phases

REQUEST = {"model": "m", "prompt": "abc"}
PATIENT = """
import functools, sys, time
from pathlib import Path
from niels_gpt.cli.main import main
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.serve import app, limits
gate, step, made = Path(sys.argv[1]), Engine.step, []
def held(engine):
    while made and not gate.exists():
        time.sleep(0.01)
    events = step(engine)
    made.extend(events)
    return events
Engine.step = held
limits.Limits = functools.partial(limits.Limits, shutdown_seconds=3600.0)
main(sys.argv[2:])
"""
"""The command line after a path: after the first token, the engine waits until there is a file at the path. When it
shuts down, the server waits for running requests for an hour."""


class Process:
    """A server that has printed its address; with a gate, as PATIENT describes."""

    def __init__(self, *arguments, env=None, gate=None):
        start = ["-m", "niels_gpt"] if gate is None else ["-c", PATIENT, str(gate)]
        command = [sys.executable, *start, "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(niels_gpt.__file__).parents[1]),
                **(env or {}),
            },
        )
        self.line = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.line)
        assert found, self.process.communicate()
        self.url = found[0]
        self.client = openai.OpenAI(base_url=self.url, api_key="unused", max_retries=0, timeout=60)

    def wait_until_it_drains(self):
        """Wait until new requests are refused, after a signal."""
        deadline = time.monotonic() + 60
        while httpx.get(self.url.replace("/v1", "/health"), timeout=60).status_code != 503:
            assert time.monotonic() < deadline

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


def test_several_models_and_the_access_log(checkpoint, token_checkpoint, token_runs, tmp_path):
    log = tmp_path / "access.jsonl"
    runs = token_runs / "runs"
    with Process(checkpoint, token_checkpoint, runs / "base", runs / "chat", checkpoint, "--access-log", log) as server:
        names = [model.id for model in server.client.models.list().data]
        assert names == ["m", "m-2", "base", "chat", "m-3"]
        for name in names:
            made = server.client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "hello"}], max_tokens=4, seed=1
            )
            assert made.usage.completion_tokens <= 4
        server.process.send_signal(signal.SIGTERM)
        _, err = server.process.communicate(timeout=60)
        assert (server.process.returncode, err) == (0, "")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [line["status"] for line in lines] == [200] * 6


def test_the_same_seed_gives_the_text_of_generate(checkpoint, capsys):
    with Process(checkpoint, "--quiet") as server:
        made = server.client.completions.create(
            model="m", prompt="abc", max_tokens=20, temperature=0.9, seed=4, extra_body={"top_k": 50}
        )
    assert call("generate", checkpoint, "abc", "--max-tokens", 20, "--seed", 4) == 0
    assert capsys.readouterr().out == f"abc{made.choices[0].text}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_shutdown_lets_streams_end(checkpoint, number, tmp_path):
    with Process(checkpoint, gate=tmp_path / "gate") as server:
        stream = server.client.completions.create(**REQUEST, max_tokens=100, stream=True)
        chunks = [next(stream)]
        server.process.send_signal(number)
        server.wait_until_it_drains()
        response = httpx.post(f"{server.url}/completions", json={**REQUEST, "max_tokens": 1}, timeout=60)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down" and "retry-after" in response.headers
        (tmp_path / "gate").touch()
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(timeout=60) == 0


def test_a_second_signal_ends_streams(checkpoint, tmp_path):
    (tmp_path / "gate").touch()
    options = ["--max-tokens", 1_000_000, "--timeout", 1000]  # minutes
    with Process(checkpoint, *options, gate=tmp_path / "gate") as server:
        stream = server.client.completions.create(**REQUEST, max_tokens=1_000_000, stream=True)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until_it_drains()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
        assert server.process.wait(timeout=60) == 0


@pytest.mark.parametrize("loading", [True, False])
def test_sigterm_ends_a_server_that_loads_or_is_idle(checkpoint, loading):
    """From the moment when its port accepts. It needs little time: no request runs, and torch is not torn down."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "niels_gpt", "serve", str(checkpoint), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(niels_gpt.__file__).parents[1])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    if loading:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert time.monotonic() < deadline
    else:
        process.stdout.readline()
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=60).status_code == 200
    began, before = time.monotonic(), cpu_seconds(process)
    process.send_signal(signal.SIGTERM)
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0 and process.stderr.read().count("Traceback") == 0
    assert usage.ru_utime + usage.ru_stime - before < 1.5 and time.monotonic() - began < 30


def cpu_seconds(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_other_sites_and_names(checkpoint):
    with Process(checkpoint, "--allow-origin", "http://localhost:3000/", "--allow-host", "pc.local") as server:
        sent = {"Origin": "http://localhost:3000", "Host": "pc.local:80"}
        response = httpx.get(f"{server.url}/models", headers=sent, timeout=60)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "http://localhost:3000"


def test_a_key_from_the_environment(checkpoint):
    with Process(checkpoint, "--host", "0.0.0.0", env={"NIELS_GPT_API_KEY": "k-1"}) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        key = {"Authorization": "Bearer k-1"}
        for headers, status in (({}, 401), (key, 200), ({**key, "Host": "my.host"}, 200)):
            assert httpx.get(f"{url}/models", headers=headers, timeout=60).status_code == status


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--host", "0.0.0.0"], ["--api-key", "NIELS_GPT_API_KEY", "127.0.0.1"]),
        (["--host", "no-such-host.invalid"], ["no-such-host.invalid"]),
        (["--api-key", ""], ["--api-key"]),
        (["--allow-origin", "*"], ["--allow-origin *", "https://example.org"]),
        (["--allow-host", "a.example:80"], ["--allow-host a.example:80", "host.docker.internal"]),
        (["missing-run", "--port", "0"], ["missing-run"]),
    ],
)
def test_mistakes(arguments, facts, checkpoint, capsys, monkeypatch):
    monkeypatch.delenv("NIELS_GPT_API_KEY", raising=False)
    runs = [] if arguments == ["missing-run"] else [checkpoint]
    assert call("serve", *runs, *arguments) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and all(fact in err for fact in facts)


def test_a_port_in_use(checkpoint, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert call("serve", checkpoint, "--port", taken.getsockname()[1]) == 1
    assert "--port 0" in capsys.readouterr().err


def test_the_page_shows_the_runs_of_a_folder(checkpoint, token_runs):
    with Process(checkpoint, "--runs", token_runs / "runs") as server:
        found = httpx.get(server.url.split("/v1")[0] + "/api/runs", timeout=60).json()["runs"]
        assert {run["name"]: run["state"] for run in found} == {"base": "finished", "chat": "finished"}


@pytest.mark.parametrize("named", [True, False])
def test_both_phases_of_a_pipeline_are_served(tmp_path, monkeypatch, capsys, named):
    write_phases(tmp_path / "runs/mine", "pretrain", "sft")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server, "run", lambda *_: None)  # else until Ctrl-C
    assert call("serve", *(["runs/mine"] if named else []), "--port", 0, "--slots", 2) == 0
    assert "serving mine-sft, mine-pretrain on" in capsys.readouterr().out
