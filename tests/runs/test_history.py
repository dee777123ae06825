"""The runs that the weights of a run came from."""

from pathlib import Path

from niels_gpt.config import RunConfig
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.history import history


def make_run(path: Path, init_from: str = "") -> RunFolder:
    path.mkdir()
    run = RunFolder(path)
    run.write_config(RunConfig(init_from=init_from))
    return run


def names(run: RunFolder) -> list[str]:
    return [past.run.path.name for past in history(run)]


def test_from_the_newest_run_to_the_oldest(tmp_path):
    first = make_run(tmp_path / "first")
    second = make_run(tmp_path / "second", str(first.best))
    third = make_run(tmp_path / "third", str(second.checkpoints / "latest"))  # a sharded checkpoint
    assert names(third) == ["third", "second", "first"]
    newest, _, oldest = history(third)
    assert (newest.start, newest.earlier.path) == (second.checkpoints / "latest", second.path)
    assert (oldest.start, oldest.earlier, oldest.from_public) == (None, None, False)


def test_a_public_model_ends_it(tmp_path):
    make_run(tmp_path / "model")  # not followed: the name is that of a public model
    (past,) = history(make_run(tmp_path / "run", f"hf:{tmp_path}/model/checkpoints/best.pt"))
    assert (past.from_public, past.earlier) == (True, None)
    assert past.start == tmp_path / "model" / "checkpoints" / "best.pt"


def test_what_is_gone_ends_it(tmp_path):
    gone = tmp_path / "gone" / "checkpoints" / "best.pt"
    (past,) = history(make_run(tmp_path / "run", str(gone)))
    assert (past.start, past.earlier.path) == (gone, tmp_path / "gone")
    assert list(history(None)) == list(history(past.earlier)) == []


def test_a_circle_ends(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    run = make_run(one, str(two / "checkpoints" / "best.pt"))
    make_run(two, str(one / "checkpoints" / "best.pt"))
    assert names(run) == ["one", "two"]
