"""`niels-gpt serve` as a process: its options, several models, signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import openai
import pytest

from niels_gpt.serve import server
from tests.cli import call
from tests.serve.test_served_model import write_phases

LONG = {"model": "m", "prompt": "abc", "max_tokens": 4000}


class Process:
    """A server that has printed its address."""

    def __init__(self, *arguments, env=None):
        command = [sys.executable, "-m", "niels_gpt", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self.line = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.line)
        assert found, self.process.communicate()
        self.url = found[0]
        self.client = openai.OpenAI(base_url=self.url, api_key="unused", max_retries=0, timeout=60)

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
        _, err = server.process.communicate(timeout=30)
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
def test_shutdown_lets_streams_end(checkpoint, number):
    with Process(checkpoint) as server:
        stream = server.client.completions.create(**LONG, stream=True)
        chunks = [next(stream)]
        server.process.send_signal(number)
        deadline = time.monotonic() + 10
        # One token each: a long request that is still taken would outlast the stream, and the server with it.
        one_token = {**LONG, "max_tokens": 1}
        while (response := httpx.post(f"{server.url}/completions", json=one_token)).status_code != 503:
            assert time.monotonic() < deadline
        assert response.json()["error"]["code"] == "shutting_down" and "retry-after" in response.headers
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(timeout=30) == 0


def test_a_second_signal_ends_streams(checkpoint):
    with Process(checkpoint, "--max-tokens", 1_000_000, "--timeout", 1000) as server:
        stream = server.client.completions.create(**{**LONG, "max_tokens": 1_000_000}, stream=True)
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
        assert server.process.wait(timeout=30) == 0


def test_a_key_from_the_environment(checkpoint):
    with Process(checkpoint, "--host", "0.0.0.0", env={"NIELS_GPT_API_KEY": "k-1"}) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/models").status_code == 401
        assert httpx.get(f"{url}/models", headers={"Authorization": "Bearer k-1"}).status_code == 200
        assert httpx.get(f"{url}/models", headers={"Authorization": "Bearer k-1", "Host": "my.host"}).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["--host", "0.0.0.0"], ["--api-key", "NIELS_GPT_API_KEY", "127.0.0.1"]),
        (["--host", "no-such-host.invalid"], ["no-such-host.invalid"]),
        (["--api-key", ""], ["--api-key"]),
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
    import socket

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
