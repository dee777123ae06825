"""What the list of models says of a loaded run."""

from niels_gpt.runs.folder import RunFolder
from niels_gpt.serve.limits import Limits
from niels_gpt.serve.served_model import load_models
from tests.cli import reciting
from tests.serve.conftest import cycle_model, served


def test_the_task_is_that_of_the_run():
    run = reciting.folder() / "run"
    [model] = load_models([run], Limits(), device="cpu")
    assert model.describe()["task"] == RunFolder(run).read_config().task == "splice"
    assert served("cycle", cycle_model()).describe()["task"] is None
