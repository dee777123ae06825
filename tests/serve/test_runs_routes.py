"""/api/runs: list, config, metrics while a run trains, samples, reports and batch rows; never a path from a request."""

import json
import os
import shutil
import threading

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from niels_gpt.report import curves
from niels_gpt.runs.info import RunInfo
from niels_gpt.runs.metrics import encode_line, read_metrics
from niels_gpt.serve import runs_routes
from niels_gpt.serve.runs_routes import runs_router
from niels_gpt.training.loop import train
from niels_gpt.training.progress import Silent
from niels_gpt.training.tasks.registry import open_task
from tests.inference.models import spread_model
from tests.report.test_memorization_page import TEXT, make_report
from tests.runs.test_catalog import make_run
from tests.serve.conftest import running, served
from tests.training import small_config, write_texts

EVERY = ("", "/metrics", "/samples", "/samples/4", "/reports", "/batches/0")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with texts, and runs/bytes: a finished run with samples and a report."""
    folder = tmp_path_factory.mktemp("trained")
    texts = write_texts(folder / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "plot_losses", lambda run: None)
        train(small_config(texts, "output.sample_every=4"), folder / "runs" / "bytes", device="cpu")
    (folder / "runs" / "bytes" / "memorization").mkdir()
    report = {**make_report(), "checkpoint": "runs/bytes/checkpoints/best.pt"}
    (folder / "runs" / "bytes" / "memorization" / "report.json").write_text(json.dumps(report), encoding="utf-8")
    return folder


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    """A copy of the folder of runs; it is listed anew for every request."""
    monkeypatch.setattr(runs_routes, "LIST_SECONDS", 0.0)
    monkeypatch.setattr(runs_routes, "REST", 0)
    shutil.copytree(trained / "runs", tmp_path / "runs")
    return tmp_path / "runs"


@pytest.fixture
def http(runs):
    with running([served("m", spread_model(T=32))], routers=[runs_router(runs)]) as server, server.http() as client:
        yield client


def listed(http):
    response = http.get("/api/runs")
    assert response.status_code == 200, response.text
    return {run["name"]: run for run in response.json()["runs"]}


def url(http, name="bytes"):
    return f"/api/runs/{listed(http)[name]['id']}"


def test_list(http, runs):
    make_run(runs / "p" / "pretrain", steps=2)
    found = listed(http)
    assert found["bytes"]["state"] == "finished" and found["p/pretrain"]["state"] == "stopped"
    for name, run in found.items():
        summary = RunInfo(runs / name, name).summary
        shared = {"changed", "task", "parameters", "steps", "total_steps", "best_loss", "best_step", "bits_per_byte"}
        assert {key: run[key] for key in shared} == {key: summary[key] for key in shared}
        assert run["loss"] == summary["last"]["loss"]
    assert str(runs) not in json.dumps(found)


def test_config_of_a_run(http, trained):
    found = http.get(url(http)).json()
    config = small_config(trained / "texts")
    assert (found["context"], found["vocabulary"], found["task"]) == (config.model.T, config.model.V, "bytes")
    assert found["differences"]["model.C"]["value"] == config.model.C
    assert set(found["checkpoints"]) >= {"best.pt", "latest.pt"} and len(found["data"]) == 2
    assert found["last_evals"].keys() == {"val_roam", "val_chat"}


def test_metrics_are_those_of_the_file(http, runs):
    found = http.get(f"{url(http)}/metrics").json()
    lines = read_metrics(runs / "bytes" / "metrics.jsonl").lines
    assert found["points"]["step"] == [m["step"] for m in lines]
    for name in ("loss", "lr", "tokens_per_s"):
        assert found["points"][name] == pytest.approx([m[name] for m in lines], rel=1e-5)
    for name in ("val_roam", "val_chat"):
        pairs = [(m["step"], m["evals"][name]) for m in lines if "evals" in m]
        assert found["evals"][name] == {"step": [s for s, _ in pairs], "loss": pytest.approx([v for _, v in pairs])}
    assert found["state"] == "finished" and found["newest_sample"] == 12


def test_only_new_points_are_sent(http, runs):
    path = f"{url(http)}/metrics"
    first = http.get(path).json()
    again = {"after": first["last_step"], "version": first["version"]}
    assert http.get(path, params=again).json()["points"]["step"] == [11]  # the last point, which could have grown
    with (runs / "bytes" / "metrics.jsonl").open("ab") as file:
        file.writelines(encode_line({"step": step, "loss": 1.5}) for step in (12, 13))
    more = http.get(path, params=again).json()
    assert more["points"] == {
        "step": [11, 12, 13],
        "loss": [first["points"]["loss"][-1], 1.5, 1.5],
        "lr": [first["points"]["lr"][-1], None, None],
        "tokens_per_s": [first["points"]["tokens_per_s"][-1], None, None],
    }
    assert (more["from"], more["version"], more["steps"]) == (11, first["version"], 14)
    whole = http.get(path, params={"after": 13, "version": "of another server"}).json()
    assert whole["from"] == 0 and len(whole["points"]["step"]) == 14


class Paused(Silent):
    """Waits after step 5 until the test has seen it."""

    def __init__(self):
        self.reached, self.resume = threading.Event(), threading.Event()

    def step(self, line):
        if line["step"] == 5:
            self.reached.set()
            assert self.resume.wait(60)


def test_a_run_while_it_trains(http, runs, trained, monkeypatch):
    monkeypatch.setattr(curves, "plot_losses", lambda run: None)
    report = Paused()
    config = small_config(trained / "texts")
    thread = threading.Thread(target=lambda: train(config, runs / "live", device="cpu", report=report))
    thread.start()
    try:
        assert report.reached.wait(60)
        found = listed(http)["live"]
        assert (found["state"], found["steps"], found["total_steps"]) == ("training", 6, 12)
        metrics = http.get(f"{url(http, 'live')}/metrics").json()
        assert metrics["state"] == "training" and metrics["points"]["step"] == list(range(6))
    finally:
        report.resume.set()
        thread.join(60)
    after = {"after": metrics["last_step"], "version": metrics["version"]}
    more = http.get(f"{url(http, 'live')}/metrics", params=after).json()
    assert more["state"] == "finished" and more["points"]["step"] == list(range(5, 12))


def test_samples(http, runs):
    path = url(http)
    assert http.get(f"{path}/samples").json() == {"steps": [4, 8, 12]}
    for step in (4, 8, 12):
        text = (runs / "bytes" / "samples" / f"step_{step:08d}.txt").read_text(encoding="utf-8")
        assert http.get(f"{path}/samples/{step}").json() == {"step": step, "text": text, "complete": True}
    large = runs / "bytes" / "samples" / "step_00000016.txt"
    large.write_bytes("é".encode() * runs_routes.SAMPLE_BYTES)
    found = http.get(f"{path}/samples/16").json()
    assert found["text"] == "é" * (runs_routes.SAMPLE_BYTES // 2) and not found["complete"]
    assert http.get(f"{path}/metrics").json()["newest_sample"] == 16


def test_samples_that_are_links_or_have_other_names_are_not_served(http, runs, tmp_path):
    folder = runs / "bytes" / "samples"
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    (folder / "step_00000020.txt").symlink_to(tmp_path / "secret")
    for name in ("step_24.txt", "step_x.txt", "step_.txt", "step_٠٠٠٠٠٠٢٨.txt"):
        (folder / name).write_text("secret", encoding="utf-8")
    assert http.get(f"{url(http)}/samples").json() == {"steps": [4, 8, 12]}
    for step in (20, 24, 28):
        assert http.get(f"{url(http)}/samples/{step}").status_code == 404


def test_reports_and_strips(http):
    path = f"{url(http)}/reports"
    found = http.get(path).json()
    [report] = found["reports"]
    assert report["folder"] == "memorization" and len(report["strips"]) == 4 and len(found["levels"]) == 6
    for number in range(4):
        strip = http.get(f"{path}/{report['id']}/strips/{number}").json()
        assert "".join(piece for piece, *_ in strip["spans"]) == TEXT and strip["end"] == strip["total"] == len(TEXT)
    assert http.get(f"{path}/{report['id']}/strips/4").status_code == 404
    assert http.get(f"{path}/{'0' * 16}/strips/0").status_code == 404


def test_a_long_strip_comes_in_parts(http, runs, monkeypatch):
    monkeypatch.setattr(runs_routes, "STRIP_CHARACTERS", 7)
    path = f"{url(http)}/reports"
    [report] = http.get(path).json()["reports"]
    text, start = "", 0
    while start < len(TEXT):
        part = http.get(f"{path}/{report['id']}/strips/1", params={"start": start}).json()
        assert part["start"] == start and 0 < part["end"] - start <= 7
        text, start = text + "".join(piece for piece, *_ in part["spans"]), part["end"]
    assert text == TEXT


def test_a_damaged_report_is_listed_with_its_problem(http, runs):
    path = runs / "bytes" / "memorization" / "report.json"
    before = http.get(f"{url(http)}/reports").json()["reports"][0]["id"]
    path.write_text("{", encoding="utf-8")
    [report] = http.get(f"{url(http)}/reports").json()["reports"]
    assert report["id"] == before and "damaged" in report["problem"]
    response = http.get(f"{url(http)}/reports/{before}/strips/0")
    assert response.status_code == 409 and response.json()["error"]["code"] == "report_damaged"


@pytest.mark.parametrize("step", [0, 7, 11, 100])
def test_batch_rows_are_those_of_the_task(http, trained, step):
    rows = open_task(small_config(trained / "texts")).origins(step)
    found = http.get(f"{url(http)}/batches/{step}").json()
    assert found["total"] == len(rows) == 4 and found["total_steps"] == 12
    for mine, row in zip(found["rows"], rows, strict=True):
        assert (mine["row"], mine["source"], mine["offset"], mine["text"]) == (
            row.row,
            row.source,
            row.offset,
            row.text,
        )
        assert row.document.endswith(mine["document"].removeprefix("~/"))
    part = http.get(f"{url(http)}/batches/{step}", params={"first": 1, "rows": 2}).json()
    assert part["rows"] == found["rows"][1:3]
    assert http.get(f"{url(http)}/batches/{step}", params={"first": 99}).json()["rows"] == []


def test_rows_of_data_that_has_changed_or_is_gone(http, runs, trained, tmp_path):
    texts = tmp_path / "texts"
    shutil.copytree(trained / "texts", texts)
    config = runs / "bytes" / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace(str(trained / "texts"), str(texts)), encoding="utf-8")
    assert http.get(f"{url(http)}/batches/0").status_code == 200
    (texts / "notes" / "note_00.md").write_text("changed", encoding="utf-8")
    os.utime(config, (1, 1))  # another time, however soon after the last change
    response = http.get(f"{url(http)}/batches/0")
    assert response.status_code == 409 and "changed" in response.json()["error"]["message"]
    shutil.rmtree(texts)
    os.utime(config, (2, 2))
    assert http.get(f"{url(http)}/batches/0").status_code == 409


def test_damaged_runs_break_neither_the_list_nor_their_routes(http, runs):
    for name in ("empty", "no-config", "bad-yaml", "torn", "huge-numbers", "wrong-types", "nested"):
        make_run(runs / name)
    shutil.rmtree(runs / "empty")
    (runs / "empty").mkdir()
    (runs / "no-config" / "config.yaml").unlink()
    (runs / "bad-yaml" / "config.yaml").write_bytes(b"\xff{{")
    with (runs / "torn" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "l')
    text = (runs / "torn" / "config.yaml").read_text(encoding="utf-8")
    huge = text.replace("total_steps: 10", f"total_steps: {hex(16**6000)}")
    (runs / "huge-numbers" / "config.yaml").write_text(huge, encoding="utf-8")
    wrong = text.replace("total_steps: 10", "total_steps: [1]")
    (runs / "wrong-types" / "config.yaml").write_text(wrong, encoding="utf-8")
    (runs / "nested" / "config.yaml").write_text("[" * 20_000, encoding="utf-8")
    bytes_name = os.fsdecode(b"not-utf8-\xff")
    make_run(runs / bytes_name)
    found = listed(http)
    assert {name: run["state"] for name, run in found.items()} == {
        "bytes": "finished",
        "no-config": "failed",
        "bad-yaml": "failed",
        "torn": "stopped",
        "huge-numbers": "stopped",
        "wrong-types": "failed",
        "nested": "failed",
        "not-utf8-?": "stopped",
    }
    for name, run in found.items():
        for route in EVERY:
            response = http.get(f"/api/runs/{run['id']}{route}")
            assert response.status_code in (200, 404, 409), (name, route, response.text)
            if response.status_code != 200:
                assert response.json()["error"]["message"].count("\n") == 0
        if run["state"] == "failed":
            assert run["problem"]


def test_a_run_that_is_removed(http, runs):
    path = url(http)
    shutil.rmtree(runs / "bytes")
    for route in EVERY:
        response = http.get(path + route)
        assert response.status_code == 404 and response.json()["error"]["code"] == "run_not_found"
    runs.rename(runs.with_name("gone"))
    assert listed(http) == {}


@pytest.mark.parametrize(
    "wrong", ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "bytes", "0" * 16, "0" * 15, "A" * 16, "%00", "é", "a" * 5000]
)
def test_only_ids_of_the_list_name_a_run(http, wrong):
    for route in EVERY:
        response = http.get(f"/api/runs/{wrong}{route}")
        assert response.status_code in (400, 404, 405) and "error" in response.json()


@pytest.mark.parametrize(
    "wrong",
    [
        "/metrics?after=-2", "/metrics?after=x", "/metrics?after=1e5", f"/metrics?after={10**40}", "/metrics?after=NaN",
        f"/metrics?version={'x' * 65}", "/samples/-1", "/samples/x", "/samples/..%2f..%2fconfig.yaml", "/batches/-1",
        f"/batches/{2**31}", "/batches/0?rows=0", "/batches/0?rows=17", "/batches/0?first=-1", "/batches/x",
        "/reports/..%2f/strips/0", f"/reports/{'0' * 16}/strips/-1", "/nothing", "/samples/4/..%2f..",
    ],
)  # fmt: skip
def test_wrong_parameters(http, wrong):
    response = http.get(url(http) + wrong)
    assert response.status_code in (400, 404) and set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_nothing_can_be_written(http):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert http.request(method, url(http)).status_code == 405


def test_key_and_host_rules_hold(runs):
    models = [served("m", spread_model(T=32))]
    with running(models, routers=[runs_router(runs)], api_key="k") as server, server.http() as http:
        assert http.get("/api/runs").status_code == 401
        good = {"Authorization": "Bearer k"}
        response = http.get("/api/runs", headers=good)
        assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
        path = f"/api/runs/{response.json()['runs'][0]['id']}"
        for route in EVERY:
            assert http.get(path + route).status_code == 401
            assert http.get(path + route, headers={**good, "Host": "evil.example"}).status_code == 403
            assert http.get(path + route, headers={**good, "Origin": "http://evil.example"}).status_code == 403


def test_too_many_requests_get_429(http, monkeypatch):
    monkeypatch.setattr(runs_routes, "WAITING", 0)
    response = http.get("/api/runs")
    assert response.status_code == 429 and int(response.headers["retry-after"]) > 0


def test_the_log_has_no_names(runs):
    with running([served("m", spread_model(T=32))], routers=[runs_router(runs)]) as server, server.http() as http:
        http.get(f"{url(http)}/metrics")
        server.wait_until(lambda: len(server.log()) >= 2)
        assert "bytes" not in json.dumps([line["path"] for line in server.log()])


ROUTES = ("", "/{run_id}", "/{run_id}/metrics", "/{run_id}/samples", "/{run_id}/samples/{step}", "/{run_id}/reports")
ROUTES += ("/{run_id}/reports/{report_id}/strips/{strip}", "/{run_id}/batches/{step}")


def test_no_request_of_the_schema_fails(http):
    """Generated requests, most of them with the id of a run, find no 5xx and no undocumented status."""
    schema = schemathesis.openapi.from_url(str(http.base_url.join("/openapi.json")))
    known = listed(http)["bytes"]["id"]
    report = http.get(f"/api/runs/{known}/reports").json()["reports"][0]["id"]
    assert {path for path in schema if path.startswith("/api/runs")} == {f"/api/runs{route}" for route in ROUTES}
    for route in ROUTES:
        operation = schema[f"/api/runs{route}"]["GET"]

        @given(case=operation.as_strategy(), use=st.booleans())
        @settings(max_examples=25, suppress_health_check=list(HealthCheck), deadline=None)
        def check(case, use):
            if use:
                case.path_parameters.update(
                    {k: v for k, v in (("run_id", known), ("report_id", report)) if "{" + k in case.path}
                )
            response = case.call(timeout=60)
            assert response.status_code in (200, 400, 404, 409), response.text
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        check()
