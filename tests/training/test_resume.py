"""Resuming from a checkpoint that can be read but does not fit: an error, and nothing has changed."""

import contextlib
import shutil
import warnings

import pytest
import torch

from niels_gpt.config.yaml_file import load_config
from niels_gpt.model.gpt import GPT
from niels_gpt.runs import sharded_checkpoint
from niels_gpt.runs.checkpoint import CheckpointError, read_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system.processes import SINGLE_PROCESS
from niels_gpt.training import loop
from niels_gpt.training.loop import train
from niels_gpt.training.optim.optimizer import make_optimizer
from niels_gpt.training.progress import Silent
from niels_gpt.training.resume import (
    TrainState,
    optimizer_state,
    restore,
    sharded_content,
)
from niels_gpt.training.tasks.registry import open_task
from tests.training import Crash, same, small_config
from tests.training.worlds import Notes

SHORT = ["train.total_steps=2", "train.warmup_steps=1", "output.checkpoint_every=1", "output.eval_every=1"]
SHORT += ["output.keep=1"]
BOTH_OPTIMIZERS = pytest.mark.parametrize("made", ["adamw", "muon"], indirect=True)


@pytest.fixture(scope="module")
def made(request, texts, tmp_path_factory):
    """(config, task, folder) of a run of two steps."""
    config = small_config(texts, *SHORT, f"train.optimizer={getattr(request, 'param', 'adamw')}")
    run = RunFolder(tmp_path_factory.mktemp("made") / "run")
    task = open_task(config)
    train(config, run, task=task)
    return config, task, run


@pytest.fixture
def copy(made, tmp_path):
    """(config, task, run, content of its checkpoint)."""
    config, task, run = made
    run = RunFolder(shutil.copytree(run.path, tmp_path / "run"))
    return config, task, run, torch.load(run.latest, weights_only=True)


def rewrite(run, saved):
    for path in [run.latest, *run.step_files()]:
        torch.save(saved, path)


def fresh(config):
    torch.manual_seed(0)
    model = GPT(config.model)
    return TrainState(model, make_optimizer(model, config.train))


def resume(config, task, run, state=None):
    """The state of a run after its checkpoint."""
    state = fresh(config) if state is None else state
    restore(state, config, task, run, "cpu", False, False, Silent(), SINGLE_PROCESS)
    return state


def adamw_state(saved):
    """The AdamW state of either optimizer."""
    return saved["optimizer"].get("adamw", saved["optimizer"])


@BOTH_OPTIMIZERS
def test_the_saved_state_is_restored(copy):
    config, task, run, saved = copy
    state = resume(config, task, run)
    assert same(state.model.state_dict(), saved["model"])
    assert same(state.optimizer.state_dict(), saved["optimizer"])
    assert (state.step, state.best) == (2, saved["extra"]["best"])


def put(value, *keys):
    """A change: replace the value at a path of the AdamW state."""

    def change(saved):
        node = adamw_state(saved)
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value(node[keys[-1]]) if callable(value) else value

    return change


STATES = {
    "too large": put(lambda old: torch.zeros(999, 16), "state", 0, "exp_avg_sq"),
    "transposed": put(lambda old: old.T, "state", 0, "exp_avg"),
    "expanded": put(lambda old: torch.zeros(1, 1).expand(old.shape), "state", 0, "exp_avg"),
    "float64": put(lambda old: old.double(), "state", 0, "exp_avg"),
    "meta": put(lambda old: old.to("meta"), "state", 0, "exp_avg"),
    "sparse": put(lambda old: old.to_sparse(), "state", 0, "exp_avg"),
    "steps": put(torch.zeros(3), "state", 0, "step"),
    "a list of states": put([], "state"),
    "a state that is a list": put([], "state", 1),
    "one state too few": lambda saved: adamw_state(saved)["state"].pop(1),
    "no moment": lambda saved: adamw_state(saved)["state"][0].pop("exp_avg"),
    "groups that are a str": put("text", "param_groups"),
    "a smaller group": lambda saved: adamw_state(saved)["param_groups"][-1]["params"].pop(),
    "nothing": lambda saved: saved["optimizer"].clear(),
    "another's": lambda saved: saved.update(optimizer={"other": saved["optimizer"]}),
}


@BOTH_OPTIMIZERS
@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_an_optimizer_state_that_does_not_fit_is_rejected(copy, change):
    config, task, run, saved = copy
    change(saved)
    rewrite(run, saved)
    state = fresh(config)
    with pytest.raises(CheckpointError, match=r"latest\.pt .*optimizer.*init_from=.*latest\.pt") as caught:
        resume(config, task, run, state)
    assert len(str(caught.value).splitlines()) == 1
    assert same(state.model.state_dict(), fresh(config).model.state_dict())
    assert state.step == 0


@pytest.mark.parametrize("made", ["muon"], indirect=True)
def test_momentum_of_another_shape_is_rejected(copy):
    config, task, run, saved = copy
    saved["optimizer"]["muon"]["state"][0]["momentum_buffer"] = torch.zeros(3)
    rewrite(run, saved)
    with pytest.raises(CheckpointError, match=r"momentum_buffer of blocks\.0\.attn\.qkv\.weight.*\(48, 16\)"):
        resume(config, task, run)


def test_a_checkpoint_without_optimizer_state_cannot_be_resumed(copy):
    config, task, run, saved = copy
    rewrite(run, {**saved, "optimizer": None})
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=r"no optimizer state.*init_from=.*latest\.pt"):
        train(config, run, task=task, resume=True)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


@BOTH_OPTIMIZERS
def test_hyperparameters_come_from_the_config(copy):
    config, task, run, saved = copy
    for group in adamw_state(saved)["param_groups"]:
        group |= {"lr": "text", "fused": torch.zeros(2), "betas": None}
    rewrite(run, saved)
    ours, theirs = (state.optimizer.param_groups for state in (resume(config, task, run), fresh(config)))
    assert [{k: v for k, v in group.items() if k != "params"} for group in ours] == [
        {k: v for k, v in group.items() if k != "params"} for group in theirs
    ]


@BOTH_OPTIMIZERS
def test_a_checkpoint_of_step_0_needs_no_optimizer_state(copy):
    """A first step that does not fit into memory leaves a checkpoint of step 0, with any state."""
    config, task, run, saved = copy
    for optimizer in (fresh(config).optimizer.state_dict(), saved["optimizer"] | {"state": {0: {}}}, None):
        rewrite(run, {**saved, "step": 0, "optimizer": optimizer})
        state = resume(config, task, run)
        assert same(state.model.state_dict(), saved["model"])
        assert not sharded_checkpoint.flat(state.optimizer.state_dict())


EXTRAS = {
    "nothing": dict.clear,
    "no best": lambda extra: extra.pop("best"),
    "best is a str": lambda extra: extra.update(best="text"),
    "best has no loss": lambda extra: extra.update(best={"step": 1}),
    "best has a loss of letters": lambda extra: extra.update(best={"step": 1, "loss": "x"}),
    "config is a str": lambda extra: extra.update(config="text"),
    "config has a task that is a dict": lambda extra: extra["config"].update(task={}),
    "config has a place": lambda extra: extra["config"].update(init_from={}),
    "config has numbers for names": lambda extra: extra["config"]["train"].update({5: 6}),
    "config has tensors": lambda extra: extra["config"]["model"].update(C=torch.zeros(3)),
    "data has numbers for names": lambda extra: extra["data"].update({5: "x"}),
    "data has tensors": lambda extra: extra["data"].update(roam=torch.zeros(3)),
    "processes is a tensor": lambda extra: extra.update(processes=torch.zeros(3)),
}


@pytest.mark.parametrize("change", EXTRAS.values(), ids=EXTRAS)
def test_an_extra_that_no_run_writes_is_rejected(copy, change):
    config, task, run, saved = copy
    change(saved["extra"])
    rewrite(run, saved)
    with pytest.raises(CheckpointError, match=r"latest\.pt.*extra.*init_from=.*latest\.pt"):
        resume(config, task, run)


def test_weights_that_do_not_fit_are_rejected(copy):
    config, task, run, saved = copy
    saved["model"]["norm.weight"] = saved["model"]["norm.weight"].to("meta")
    rewrite(run, saved)
    with pytest.raises(CheckpointError, match=r"latest\.pt.*norm\.weight"):
        resume(config, task, run)


def test_init_from_with_an_invalid_config_is_rejected(copy, tmp_path):
    _, task, _, saved = copy
    torch.save({**saved, "config": saved["config"] | {"D": torch.zeros(3)}}, tmp_path / "a.pt")
    config = small_config(tmp_path, *SHORT, f"init_from={tmp_path / 'a.pt'}")
    with pytest.raises(CheckpointError, match=r"a\.pt .*config"):
        train(config, RunFolder(tmp_path / "new"), task=task)


@BOTH_OPTIMIZERS
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process
def test_the_state_in_a_folder_equals_that_in_a_file(copy, tmp_path):
    config, task, run, saved = copy
    tensors, head = sharded_content(resume(config, task, run), saved["extra"])
    folder = tmp_path / "folder"
    folder.mkdir()
    sharded_checkpoint.write_head(folder, head, [sharded_checkpoint.write_shards(folder, tensors, rank=0, group=None)])
    ours = optimizer_state(fresh(config), read_checkpoint(folder, "cpu")["optimizer"], where="folder")
    assert same(ours, optimizer_state(fresh(config), saved["optimizer"], where="file"))


# --- notes, and what may change ----------------------------------------------------------------------


@pytest.mark.parametrize(("before", "noted"), [(None, False), (1, False), (2, True)])
def test_another_number_of_processes_is_noted(copy, before, noted):
    config, task, run, saved = copy
    if before is not None:
        saved["extra"]["processes"] = before
    rewrite(run, saved)
    notes = Notes()
    restore(fresh(config), config, task, run, "cpu", False, False, notes, SINGLE_PROCESS)
    assert notes.texts[0] == f"resuming {run.path} at step 2"
    assert len(notes.texts) == 1 + noted
    if noted:
        assert "from 2 to 1" in notes.texts[1] and "dropout" in notes.texts[1]  # the config has dropout


def test_without_best_pt_the_next_evaluation_is_the_best(copy):
    config, task, run, _ = copy
    assert resume(config, task, run).best is not None
    run.best.unlink()
    assert resume(config, task, run).best is None


@pytest.mark.parametrize(
    ("change", "unless_asked", "if_asked"),
    [
        ("train.base_lr=0.5", r"train\.base_lr.*--allow-config-change", None),
        ("model.dropout=0.5", r"model\.dropout.*new run", r"model\.dropout.*new run"),
        ("train.optimizer=muon", r"train\.optimizer.*new run", r"train\.optimizer.*new run"),
        *((change, None, None) for change in ("train.accumulate=2", "output.eval_every=2")),
    ],
)
def test_which_config_changes_are_allowed(copy, texts, change, unless_asked, if_asked):
    _, task, run, _ = copy
    other = small_config(texts, *SHORT, change)
    for allow, error in ((False, unless_asked), (True, if_asked)):
        with pytest.raises(ValueError, match=error) if error else contextlib.nullcontext():
            restore(fresh(other), other, task, run, "cpu", False, allow, Silent(), SINGLE_PROCESS)


@pytest.mark.parametrize("data", [{"roam": "other"}, {"more": "x"}])
def test_other_data_is_allowed_on_request(copy, data):
    config, task, run, saved = copy
    saved["extra"]["data"] |= data
    rewrite(run, saved)
    with pytest.raises(ValueError, match=rf"{next(iter(data))};.*--allow-data-change"):
        resume(config, task, run)
    restore(fresh(config), config, task, run, "cpu", True, False, Silent(), SINGLE_PROCESS)


def test_changed_settings_and_damaged_metrics_are_reported(copy):
    """A resumed run uses an edited config.yaml, and says so; then it has intact metrics and no more to say."""
    _, task, run, _ = copy
    text = run.config_path.read_text(encoding="utf-8")
    every = run.read_config().output.eval_every
    run.config_path.write_text(text.replace(f"eval_every: {every}", "eval_every: 77"), encoding="utf-8")
    first, *rest = run.metrics_path.read_bytes().splitlines(keepends=True)
    run.metrics_path.write_bytes(b"".join([first.replace(b'"loss": ', b'"loss": 1'), *rest]))
    config = load_config(run.config_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        train(config, run, task=task, resume=True)
    told = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert len(told) == 2
    assert f"output.eval_every was {every}, is 77" in told[0]
    assert "metrics.jsonl has 1 damaged line (line 1): skipped" in told[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        train(config, run, task=task, resume=True)
    assert [line["step"] for line in run.metrics()] == [1]


@pytest.mark.parametrize("killed_after", [1, 2])
def test_a_sample_that_a_kill_prevented_is_written(texts, tmp_path, monkeypatch, killed_after):
    """The sample follows its checkpoint. A kill between them is made up for, also when the run is finished."""
    config = small_config(texts, *SHORT, "output.sample_every=1")
    expected = RunFolder(tmp_path / "expected")
    train(config, expected)

    def killed(model, step, *rest):
        if step == killed_after:
            raise Crash
        return write_sample(model, step, *rest)

    write_sample = loop._write_sample
    run = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr(loop, "_write_sample", killed)
        train(config, run)
    assert len(list(run.samples.iterdir())) == killed_after - 1
    train(config, run, resume=True)
    names = ["step_00000001.txt", "step_00000002.txt"]
    for folder in (run, expected):
        assert sorted(path.name for path in folder.samples.iterdir()) == names
    assert all((run.samples / name).read_bytes() == (expected.samples / name).read_bytes() for name in names)
