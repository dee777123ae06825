"""The access log, the metrics, and what a request must not leave in them."""

import json
import os
import threading
import time

import httpx

from niels_gpt.serve.records import LineWriter
from tests.serve.conftest import cycle_model, running, served

SECRET = "a-secret-text"


def test_log_and_metrics():
    with running([served("cycle", cycle_model())]) as server, server.client() as client, server.http() as http:
        client.completions.create(model="cycle", prompt=SECRET, max_tokens=3, temperature=0)
        list(client.completions.create(model="cycle", prompt=SECRET, max_tokens=5, temperature=0, stream=True))
        http.get(f"/v1/models?key={SECRET}")
        http.get("/v1/models/nothing")
        http.post("/v1/completions", json={"model": SECRET, "prompt": SECRET})
        http.get("/nothing")
        server.wait_until(lambda: len(server.log()) == 6)
        lines = server.log()
        text = http.get("/metrics").text
        assert [line["status"] for line in lines] == [200, 200, 200, 404, 404, 404]
        assert [line["path"] for line in lines[:3]] == ["/v1/completions"] * 2 + ["/v1/models"]
        assert [(line["tokens_in"], line["tokens_out"]) for line in lines[:2]] == [(13, 3), (13, 5)]
        assert lines[1]["tokens_cached"] == 12 and lines[0]["model"] == "cycle"
        assert all(0 <= line["first_token_ms"] <= line["ms"] for line in lines[:2])
        assert SECRET not in json.dumps(lines) and SECRET not in text
        assert 'niels_gpt_completion_tokens_total{model="cycle"} 8.0' in text
        assert 'niels_gpt_cached_prompt_tokens_total{model="cycle"} 12.0' in text
        assert 'niels_gpt_requests_total{route="/v1/completions",status="200"} 2.0' in text
        assert 'niels_gpt_requests_total{route="other",status="404"} 1.0' in text
        assert 'niels_gpt_active{model="cycle"} 0.0' in text
        assert 'niels_gpt_first_token_seconds_count{model="cycle"} 2.0' in text


def test_clients_cannot_add_labels(http, server):
    def ask(i):
        http.get(f"/path/{i}")
        http.get(f"/v1/models/m{i}")
        http.request(f"VERB{i}", "/health")

    ask(0)
    http.get("/metrics")
    before = http.get("/metrics").text
    for i in range(1, 20):
        ask(i)
    after = http.get("/metrics").text
    assert len(after.splitlines()) == len(before.splitlines())
    assert "path/7" not in after and "m7" not in after and "VERB7" not in after


class FullDisk:
    """A file that takes no line while it is full."""

    def __init__(self):
        self.full, self.tried, self.text = True, threading.Event(), ""

    def write(self, text):
        self.tried.set()
        if self.full:
            raise OSError("no space left")
        self.text += text

    def flush(self):
        pass


def test_a_log_that_cannot_be_written_does_not_stop_the_server():
    file = FullDisk()
    writer = LineWriter(file)
    for _ in range(20_000):  # more than may wait
        writer.write("lost")
    deadline = time.monotonic() + 60
    while writer._dropped < 20_000 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert file.tried.is_set() and file.text == ""
    file.full = False
    writer.write("kept")
    writer.close()
    writer._thread.join(60)  # on a busy machine a line can take longer than `close` waits
    assert file.text.splitlines() == ['{"dropped_lines": 20000}', "kept"]


def test_a_pipe_that_nobody_reads_does_not_stop_the_server():
    reading, writing = os.pipe()
    writer = LineWriter(os.fdopen(writing, "w"))

    def write():
        for _ in range(20_000):  # a pipe holds 64 KB
            writer.write("x" * 100)
        writer.close()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    os.close(reading)


def test_health(server):
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
