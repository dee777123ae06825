"""`niels-gpt import hf NAME/MODEL` with the real client of the Hub and a Hub on localhost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from niels_gpt.runs.checkpoint import load_model
from tests.hub_client import HubClient
from tests.hub_server import Fault, HubServer
from tests.pretrained.conftest import random_model, save

NAME = "somebody/tiny-llama"


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as hub:
        yield hub


@pytest.fixture(scope="module")
def client(hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubClient]:
    with HubClient(hub.url, tmp_path_factory.mktemp("hub")) as client:
        yield client


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A repository in two shards, with a pickle and code, which nothing may load, and with copies of its weights."""
    folder = save(random_model("smollm2"), tmp_path_factory.mktemp("model"), max_shard_size="150KB")
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sum(name.endswith(".safetensors") for name in made) > 1
    copies = dict.fromkeys(("consolidated.safetensors", "fp16/model.safetensors"), b"a copy")
    return made | {"pytorch_model.bin": b"a pickle", "modeling_custom.py": b"raise SystemExit"} | copies


def test_a_repository_is_downloaded_once_without_pickles_and_code(
    hub: HubServer, client: HubClient, files: dict[str, bytes]
) -> None:
    hub.commit(NAME, files)
    for number in (1, 2):
        hub.requests.clear()
        done = client.run("import", "hf", NAME, "--run-dir", f"run{number}")
        assert done.status == 0, done.stderr
        fetched = [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request]
        unwanted = ("pytorch_model.bin", ".py", "consolidated", "fp16/")
        assert not any(name in request for request in fetched for name in unwanted)
        assert bool(fetched) == (number == 1)
    ids = torch.randint(300, (1, 20))
    with torch.no_grad():
        model, _ = load_model(client.folder / "run1" / "checkpoints" / "best.pt")
        expected = random_model("smollm2")(ids).logits
        found = model(ids)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_revisions(hub: HubServer, client: HubClient, files: dict[str, bytes]) -> None:
    name = "somebody/revised"
    first = hub.commit(name, files)
    hub.commit(name, {"README.md": b"emptied"})
    assert client.run("import", "hf", name, "--revision", first, "--run-dir", "revised").status == 0
    done = client.run("import", "hf", name, "--revision", "no-such-branch", "--run-dir", "other")
    assert done.status == 1 and "no-such-branch" in done.stderr
    done = client.run("import", "hf", name, "--run-dir", "other")
    assert done.status == 1 and "config.json" in done.stderr
    assert not (client.folder / "other" / "config.yaml").exists()


@pytest.mark.parametrize("status", [404, 500])
def test_a_hub_that_does_not_answer(hub: HubServer, client: HubClient, status: int, tmp_path: Path) -> None:
    name = f"nobody/gone-{status}"
    if status == 500:
        hub.faults.append(Fault(f"models/{name}", kind="status", status=500, times=-1))
    done = client.run("import", "hf", name, "--run-dir", "gone")
    hub.faults.clear()
    assert done.status == 1 and name in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
