"""What demo and notes share: a model over bytes that was killed after its last checkpoint."""

from types import SimpleNamespace

from niels_gpt.cli import first_model
from niels_gpt.runs.environment import recorded_session
from niels_gpt.runs.folder import RunFolder


def test_a_run_killed_after_its_last_checkpoint_is_resumed_once(tmp_path, monkeypatch):
    run, resumed = RunFolder(tmp_path / "run"), []
    run.samples.mkdir(parents=True)
    run.metrics_path.touch()
    config = SimpleNamespace(train=SimpleNamespace(total_steps=4))
    monkeypatch.setattr(RunFolder, "newest_checkpoint", lambda *_, **__: (run.latest, {"step": 4}, []))
    monkeypatch.setattr("niels_gpt.runs.loading.load_run", lambda *_: None)

    def complete(*_, resume, **__):
        resumed.append(resume)
        run.checkpoints.mkdir()
        for path in (run.latest, run.sample_path(4), run.plot_path):
            path.touch()
        with recorded_session(run.path, step=4, processes=1, machine={}, data=[], fingerprint={}):
            pass
        return SimpleNamespace(stopped_by=None)

    monkeypatch.setattr("niels_gpt.cli.train.train_and_report", complete)
    for _ in range(2):
        first_model._train_one(config, run, "cpu", None, resume=True)
    assert resumed == [True]
