"""Provenance over HTTP: a run that recites two notes."""

import json
import threading
import time

import pytest

from niels_gpt.serve import provenance_search
from niels_gpt.serve.page_routes import PAGE_ROUTERS, STATIC
from niels_gpt.serve.served_model import load_models
from tests.cli import reciting
from tests.serve.conftest import LIMITS, running


@pytest.fixture(scope="module")
def note():
    """The text of a note that the run was trained on."""
    place = reciting.folder()
    name = reciting.longest(reciting.split(place / "notes")[0], 1)[0]
    return (place / "notes" / name).read_text(encoding="utf-8")


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    models = load_models([reciting.folder() / "run"], LIMITS, device="cpu")
    with running(models, routers=PAGE_ROUTERS, static=STATIC) as found:
        yield found


def test_a_copied_passage_is_found_where_it_was_trained_on(http, note):
    copied = note[100:300]
    found = http.post("/api/provenance", json={"model": "run", "text": f"Never seen before. {copied}"}).json()
    assert found["recites"] is True and found["verdict"].startswith("recites")
    span = found["spans"][0]
    assert found["text"][span["start"] : span["end"]] == span["text"] and copied.strip() in span["text"]
    passage = span["passages"][0]
    assert passage["text"] == span["text"]
    assert (passage["before"] + passage["text"] + passage["after"]) in note


def test_other_text_does_not_recite(http):
    text = "Zebras quietly juggle violet xylophones behind quartz windmills every Wednesday."
    found = http.post("/api/provenance", json={"model": "run", "text": text}).json()
    assert found["recites"] is False and found["spans"] == []


def test_no_response_has_a_path(http, note):
    response = http.post("/api/provenance", json={"model": "run", "text": note[:300]})
    assert str(reciting.folder()) not in response.text
    assert all("file" not in passage for span in response.json()["spans"] for passage in span["passages"])


def test_while_the_index_is_built_the_answer_is_to_try_again(http, note, monkeypatch):
    ready = threading.Event()
    build = provenance_search.open_provenance

    def slow(loaded, progress):
        assert ready.wait(60)
        return build(loaded, progress)

    monkeypatch.setattr(provenance_search, "open_provenance", slow)
    monkeypatch.setattr(provenance_search, "PATIENCE", 0.05)
    body = {"model": "run", "text": note[:300]}
    early = http.post("/api/provenance", json=body)
    assert early.status_code == 503 and early.headers["retry-after"] == "2"
    assert early.json()["error"]["code"] == "index_building"
    ready.set()
    monkeypatch.setattr(provenance_search, "PATIENCE", 60.0)
    assert http.post("/api/provenance", json=body).json()["recites"] is True


def test_a_server_that_ends_gives_up_the_index(note, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(provenance_search, "PATIENCE", 0.05)
    started, stopped = threading.Event(), threading.Event()

    def endless(loaded, progress):
        started.set()
        end = time.monotonic() + 60
        with progress("indexing") as report:
            try:
                while time.monotonic() < end:
                    report(0, None)
                    time.sleep(0.01)
            except RuntimeError:
                stopped.set()
                raise

    monkeypatch.setattr(provenance_search, "open_provenance", endless)
    models = load_models([reciting.folder() / "run"], LIMITS, device="cpu")
    with running(models, routers=PAGE_ROUTERS, static=STATIC) as server, server.http() as http:
        assert http.post("/api/provenance", json={"model": "run", "text": note[:300]}).status_code == 503
        assert started.wait(60)
    assert stopped.is_set()


def test_training_text_that_is_gone_is_400_without_its_path(http, monkeypatch):
    def gone(loaded, progress):
        raise ValueError(f"there is no training text to search: {loaded.path} is gone")

    monkeypatch.setattr(provenance_search, "open_provenance", gone)
    for _ in range(2):  # the second request tries again
        response = http.post("/api/provenance", json={"model": "run", "text": "a" * 100})
        assert response.status_code == 400
        assert json.loads(response.text)["error"]["code"] == "no_training_text"
        assert str(reciting.folder()) not in response.text


def test_bad_text_is_400(http):
    for text in ("", "a" * 70_000):
        response = http.post("/api/provenance", json={"model": "run", "text": text})
        assert response.status_code == 400, text[:10]
