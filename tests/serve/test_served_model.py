"""What the list of models says of a loaded run."""

import dataclasses

import pytest

from niels_gpt.config import RunConfig
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.pipeline import PipelineFolder
from niels_gpt.serve.limits import Limits
from niels_gpt.serve.served_model import load_models
from tests.cli import reciting
from tests.serve.conftest import cycle_model, running, served


def test_the_task_is_that_of_the_run():
    run = reciting.folder() / "run"
    [model] = load_models([run], Limits(), device="cpu")
    assert model.describe()["task"] == RunFolder(run).read_config().task == "splice"
    assert served("cycle", cycle_model()).describe()["task"] is None


def write_phases(folder, *names):
    """A pipeline over bytes, of which these phases have a checkpoint."""
    model = cycle_model()
    config = dataclasses.replace(RunConfig(), model=model.config)
    pipeline = PipelineFolder(folder)
    pipeline.write_configs({"pretrain": config, "sft": config})
    for name in names:
        run = pipeline.runs[name]
        run.checkpoints.mkdir(parents=True)
        run.write_config(config)
        save_checkpoint(run.best, model, None, 3, model.config)
    return folder


@pytest.mark.parametrize("phases", [("pretrain",), ("pretrain", "sft")])
def test_the_name_of_a_pipeline_is_an_alias_of_its_newest_phase(tmp_path, phases):
    folder = write_phases(tmp_path / "mine", *phases)
    models = load_models([folder / phase for phase in phases], Limits(slots=2), device="cpu")
    chosen = f"mine-{phases[-1]}"
    with running(models) as server, server.http() as http:
        listed = {model["id"]: model["aliases"] for model in http.get("/v1/models").json()["data"]}
        assert listed == {f"mine-{phase}": ["mine"] if phase == phases[-1] else [] for phase in phases}
        assert http.get("/v1/models/mine").json()["id"] == chosen
        reply = http.post("/v1/completions", json={"model": "mine", "prompt": "a", "max_tokens": 1})
        assert reply.status_code == 200 and reply.json()["model"] == chosen
        assert http.get("/v1/models/mine-other").status_code == 404


def test_an_alias_hides_no_model(tmp_path):
    pipeline = write_phases(tmp_path / "a/mine", "pretrain", "sft")
    run = write_phases(tmp_path / "b", "sft") / "sft"
    (tmp_path / "b/pretrain.yaml").unlink()
    run.rename(tmp_path / "b/mine")
    models = load_models([pipeline, tmp_path / "b/mine"], Limits(slots=2), device="cpu")
    assert [(model.id, model.aliases) for model in models] == [("mine-sft", ()), ("mine-pretrain", ()), ("mine", ())]


@pytest.mark.parametrize("phases", [("pretrain",), ("sft",), ("pretrain", "sft")])
def test_all_trained_phases_of_a_pipeline_are_served(tmp_path, phases):
    """The chat model is the first: clients and the page choose it."""
    models = load_models([write_phases(tmp_path / "mine", *phases)], Limits(slots=2), device="cpu")
    assert [model.id for model in models] == [f"mine-{phase}" for phase in reversed(phases)]
    assert [model.aliases for model in models] == [("mine",), ()][: len(phases)]


def test_a_phase_that_is_named_is_served_alone(tmp_path):
    folder = write_phases(tmp_path / "mine", "pretrain", "sft")
    assert [model.id for model in load_models([folder / "pretrain"], Limits(slots=2), device="cpu")] == [
        "mine-pretrain"
    ]


def test_a_pipeline_without_a_model(tmp_path):
    with pytest.raises((ValueError, OSError), match="mine"):
        load_models([write_phases(tmp_path / "mine")], Limits(slots=2), device="cpu")
