"""The list of runs: from small files alone, damaged ones included; and removing runs."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import time

import pytest

from niels_gpt.config.yaml_file import dump_config, load_config
from niels_gpt.model.gpt import GPT
from niels_gpt.runs import catalog
from niels_gpt.runs.catalog import config_table, without_own_paths
from niels_gpt.runs.info import RunInfo, disk_usage, store_scores
from niels_gpt.runs.pipeline import PHASES
from niels_gpt.system import files
from niels_gpt.system.program import command
from tests.faults import flipped

P_VAL = "train.p_val={roam: 0.25, primer: 0.75}"


def make_run(path, *overrides, evals=(), steps=3, checkpoints=()):
    """A run folder as training leaves it, with checkpoints that nothing can load."""
    (path / "checkpoints").mkdir(parents=True)
    config = load_config(None, overrides=["model.C=16", "model.H=2", "train.total_steps=10", *overrides])
    (path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    lines = [{"step": i, "loss": 5.0 - i, "lr": 0.1} for i in range(steps)]
    for step, values in evals:
        lines[step]["evals"] = values
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    for name in checkpoints:
        (path / "checkpoints" / name).write_bytes(b"x" * 1000)
    return path


def test_a_run_of_bytes(tmp_path):
    evals = [(0, {"val_roam": 4.0, "val_chat": 2.0}), (1, {"val_roam": 2.0, "val_chat": 1.0}), (2, {"val_roam": 9.0})]
    run = make_run(tmp_path / "a", P_VAL, evals=evals, checkpoints=["best.pt"])
    os.link(run / "checkpoints/best.pt", run / "checkpoints/latest.pt")
    summary = RunInfo(run)
    config = load_config(run / "config.yaml")
    assert (summary.task, summary.steps, summary.total_steps, summary.state) == ("bytes", 3, 10, "stopped")
    assert summary.parameters == GPT(config.model).num_parameters()
    assert summary.best_loss == pytest.approx(0.25 * 2.0 + 0.75 * 1.0) and summary.best_step == 2
    assert summary.bits_per_byte == pytest.approx(1.25 / math.log(2))
    sizes = sum(path.stat().st_size for path in (run / "config.yaml", run / "metrics.jsonl"))
    assert summary.disk == sizes + 1000  # two names of one file


def test_the_base_of_a_pipeline_is_not_one_of_its_phases(tmp_path):
    for name in ("base", "pretrain", "sft"):
        make_run(tmp_path / "notes" / name, steps=10)
    (tmp_path / "notes/pretrain.yaml").touch()
    assert [path.name for path in catalog.resolve_runs("notes", tmp_path)] == ["pretrain", "sft"]
    assert [path.name for path in catalog.resolve_runs("notes/base", tmp_path)] == ["base"]
    assert {path.name for path in catalog.check_removable(tmp_path / "notes")} == {"base", "pretrain", "sft"}


@pytest.mark.parametrize(("task", "name"), [("pretrain", "val_pretrain"), ("sft", "val_sft")])
def test_bits_per_byte_of_tokens_come_from_a_stored_evaluation_of_that_checkpoint(tmp_path, task, name):
    shares = "train.p_train={a: 0.5, b: 0.5}"
    run = make_run(tmp_path / "a", f"task={task}", shares, evals=[(1, {name: 3.0}), (2, {name: 4.0})])
    assert (RunInfo(run).best_loss, RunInfo(run).bits_per_byte) == (3.0, None)
    scores = {"val_a": {"bits_per_byte": 1.0}, "val_b": {"bits_per_byte": 2.0}}
    store_scores(run, {"step": 2, "scores": scores, "checkpoint": "/home/me/x.pt"})
    assert RunInfo(run).bits_per_byte == pytest.approx(1.5)
    assert "/home/me" not in (run / "eval.json").read_text(encoding="utf-8")
    for damaged in flipped((run / "eval.json").read_bytes()):
        (run / "eval.json").write_bytes(damaged)
        assert RunInfo(run).bits_per_byte in (1.5, None)
    store_scores(run, {"step": 1, "scores": scores})  # of an older best checkpoint
    assert RunInfo(run).bits_per_byte is None


def test_all_runs_of_a_folder_newest_first(tmp_path):
    for age, name in enumerate(["old", "pipe/pretrain", "pipe/sft", "study/a-1"]):
        run = make_run(tmp_path / name, steps=10)
        for file in ("config.yaml", "metrics.jsonl"):
            os.utime(run / file, (1e9 + age, 1e9 + age))
    (tmp_path / "notes").mkdir()
    (tmp_path / "law.png").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "old")
    found = catalog.newest_first(tmp_path)
    assert [run.name for run in found] == ["study/a-1", "pipe/sft", "pipe/pretrain", "old"]
    assert {run.state for run in found} == {"finished"}
    assert [path.name for path in catalog.resolve_runs("pipe", tmp_path)] == ["pretrain", "sft"]
    assert catalog.newest_first(tmp_path / "none") == []
    for folder, known in ((tmp_path, "old, pipe/pretrain, pipe/sft, study/a-1"), (tmp_path / "none", "none")):
        with pytest.raises(ValueError, match=f"no run gone, .*{known}\\)$"):
            catalog.locate("gone", folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run / "config.yaml").write_text("model: [", encoding="utf-8"),
        lambda run: (run / "config.yaml").write_text("just text", encoding="utf-8"),
        lambda run: (run / "config.yaml").write_text("model: {C: 3, H: 2}\ntrain: {}", encoding="utf-8"),
        lambda run: (run / "config.yaml").write_text("model: " + "[" * 100_000, encoding="utf-8"),  # C parser: SIGSEGV
        lambda run: (run / "config.yaml").write_text("- " * 100_000, encoding="utf-8"),
        lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe\x00"),
        lambda run: (run / "config.yaml").unlink(),
        lambda run: (run / "config.yaml").write_text("model: {}\ntrain: {total_steps: many}", encoding="utf-8"),
    ],
)
def test_a_damaged_run_is_listed_as_damaged(tmp_path, damage):
    make_run(tmp_path / "good")
    damage(make_run(tmp_path / "bad", checkpoints=["best.pt"]))
    states = {run.name: run.state for run in catalog.newest_first(tmp_path)}
    assert states == {"good": "stopped", "bad": "damaged"}
    assert RunInfo(tmp_path / "bad").detail["problem"]


def test_truncated_metrics_are_read_as_far_as_possible(tmp_path):
    run = make_run(tmp_path / "a", P_VAL, evals=[(1, {"val_roam": 1.0, "val_chat": 1.0})])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "loss": 1.0, "evals": {"val_ro')
    summary = RunInfo(run)
    assert (summary.steps, summary.best_step, summary.state) == (3, 2, "stopped")


def test_a_hundred_runs_are_listed_without_torch(tmp_path):
    source = make_run(tmp_path / "0", evals=[(i, {"val_wiki": 3.0}) for i in range(0, 1000, 50)], steps=1000)
    for i in range(1, 100):
        shutil.copytree(source, tmp_path / str(i))
    start = time.process_time()
    assert len([run.summary for run in catalog.newest_first(tmp_path)]) == 100
    assert time.process_time() - start < 5
    code = "import sys, pathlib; from niels_gpt.runs.catalog import newest_first\n"
    code += f"assert all(run.summary for run in newest_first(pathlib.Path({str(tmp_path)!r})))"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_details_of_a_run(tmp_path):
    evals = [(2, {"val_wiki": 2.0, "loss/x": 1.0})]
    run = make_run(tmp_path / "a", "data.roam=/my/notes", evals=evals, checkpoints=["best.pt", "step_00000003.pt"])
    detail = RunInfo(run).detail
    assert detail["differences"]["model.C"] == (256, 16)
    assert "train.base_lr" not in detail["differences"]
    assert any("/my/notes" in line for line in detail["data"])
    assert detail["checkpoints"] == {"best.pt": 1000, "step_00000003.pt": 1000}
    assert detail["last_evals"] == {"val_wiki": 2.0}
    assert any("--resume" in command for command in detail["next"])


def test_checkpoints_that_are_the_same_file(tmp_path):
    run = make_run(tmp_path / "a", checkpoints=["best.pt", "step_00000002.pt"])
    os.link(run / "checkpoints/step_00000002.pt", run / "checkpoints/latest.pt")
    assert RunInfo(run).detail["same_files"] == {"step_00000002.pt": "latest.pt"}
    (run / "checkpoints/latest.pt").unlink()
    (run / "checkpoints/step_00000003").mkdir()
    (run / "checkpoints/latest").symlink_to("step_00000003")  # a sharded checkpoint
    assert RunInfo(run).detail["same_files"] == {"step_00000003": "latest"}


def make_pipeline(path, *, sft_steps=10):
    for phase in PHASES:
        steps, shares = (10, "{roam: 1.0}") if phase == "pretrain" else (sft_steps, "{primer: 1.0}")
        overrides = [f"task={phase}", f"train.p_train={shares}", f"data.token_cache={path}/cache"]
        make_run(path / phase, *overrides, steps=steps, checkpoints=["best.pt"])
        shutil.copy(path / phase / "config.yaml", path / f"{phase}.yaml")
    return path


def test_the_next_commands_name_the_run_and_are_quoted(tmp_path):
    run = make_run(tmp_path / "a b", steps=10, checkpoints=["best.pt"])
    more = command("train", run, "--resume", "--steps", "20")
    assert RunInfo(run).detail["next"] == [command("chat", run), command("eval", run), more]
    assert "'" in more
    splice = make_run(tmp_path / "s", "task=splice", checkpoints=["best.pt"])
    assert RunInfo(splice).detail["next"] == [
        command("train", splice, "--resume"),
        command("research", "memorize", splice),
    ]
    alone = make_run(tmp_path / "p", "task=pretrain", 'output.sample_prompt="# "', steps=10, checkpoints=["best.pt"])
    assert RunInfo(alone).detail["next"][:2] == [command("generate", alone, "# "), command("eval", alone)]


def test_the_next_commands_of_a_pipeline(tmp_path):
    pipe = make_pipeline(tmp_path / "pipe")
    pretrain, sft = (RunInfo(pipe / phase).detail["next"] for phase in PHASES)
    assert pretrain == [command("generate", pipe / "pretrain", "The "), command("eval", pipe / "pretrain")]
    more = command("train", pipe / "sft", "--resume", "--steps", "20")
    assert sft == [command("chat", pipe), command("eval", pipe), more]
    stopped = make_pipeline(tmp_path / "stopped", sft_steps=3)
    resume = command("pipeline", stopped, "--resume")
    assert [RunInfo(stopped / phase).detail["next"][0] for phase in PHASES] == [resume, resume]
    with files.lock(stopped / "sft" / "run.lock"):
        assert resume not in RunInfo(stopped / "pretrain").detail["next"]
    shutil.rmtree(stopped / "sft")
    assert RunInfo(stopped / "pretrain").detail["next"][0] == resume


def test_differences_without_paths_inside_the_runs(tmp_path):
    runs = [make_pipeline(tmp_path / name) / "sft" for name in ("p", "q")]
    table = config_table({name: RunInfo(run) for name, run in zip("pq", runs, strict=True)})
    assert list(table) == ["data.token_cache"]
    assert without_own_paths(table, runs) == {}
    source = {"path": f"{tmp_path}/p/cache/x.jsonl", "kind": "chat", "field": "", "split": [], "columns": {}}
    table = {
        "init_from": [f"{tmp_path}/p/pretrain/checkpoints/best.pt", ""],
        "data.token_cache": [f"{tmp_path}/p/cache", "/shared"],
        "data.roam": [f"{tmp_path}/p2", "/notes"],
        "data.sources.x": [source, None],
        "data.sources.x.path": [source["path"], None],
    }
    assert without_own_paths(table, runs) == {
        "init_from": table["init_from"],
        "data.token_cache": [None, "/shared"],
        "data.roam": table["data.roam"],
        "data.sources.x": [{"kind": "chat"}, None],
    }


def test_the_differences_of_configs(tmp_path):
    made = {"a": (), "b": ("train.B=8",), "c": ("model.T=32",)}
    runs = {name: RunInfo(make_run(tmp_path / name, *overrides)) for name, overrides in made.items()}
    assert config_table(runs) == {"train.B": [32, 8, 32], "model.T": [256, 256, 32]}
    assert catalog.unique_names([tmp_path / "x/a", tmp_path / "y/a"], tmp_path / "x") == {
        "a": tmp_path / "x/a",
        str(tmp_path / "y/a"): tmp_path / "y/a",
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((1 - 0.8, "0.2"), (1 / 3, "0.333333333333"), (7, "7"), (None, "None"), (True, "True")),
        *(("é b", "é b"), ("", "''"), (" a", "' a'"), ("a\nb", r"'a\nb'")),
        *(({"b": [0.1 + 0.2, "é"], "a": {}}, "{b: [0.3, é], a: {}}"), ((1 - 0.9, 1), "[0.1, 1]"), ([], "[]")),
    ],
)
def test_a_value_is_shown_on_one_line(value, text):
    assert catalog.value_text(value) == text


def test_of_two_folders_of_a_name_the_one_with_runs_is_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    made = make_run(tmp_path / "runs/notes/sft").parent
    assert catalog.locate("notes") == made.relative_to(tmp_path)
    make_run(tmp_path / "notes/x")
    assert str(catalog.locate("notes")) == "notes"


# --- removing ----------------------------------------------------------------------------------------


def test_removing_a_run_frees_its_disk_space(tmp_path):
    run = make_run(tmp_path / "a", checkpoints=["best.pt"])
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").write_text("x", encoding="utf-8")
    (run / "link").symlink_to(outside)
    size = disk_usage(run)
    assert size > 1000
    assert catalog.remove(run) == size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious"] and (outside / "file").exists()


def test_a_pipeline_is_removed_as_a_whole(tmp_path):
    for name in PHASES:
        make_run(tmp_path / "pipe" / name)
    catalog.remove(tmp_path / "pipe")
    assert list(tmp_path.iterdir()) == []


def test_a_pipeline_is_removed_with_its_caches_and_nothing_else(tmp_path):
    pipe = make_pipeline(tmp_path / "pipe")
    (pipe / "cache" / "tokenizer").mkdir(parents=True)
    (pipe / "thesis").mkdir()
    with pytest.raises(ValueError, match=r"more than runs \(thesis\)"):
        catalog.remove(pipe)
    (pipe / "thesis").rmdir()
    catalog.remove(pipe)
    assert list(tmp_path.iterdir()) == []


def test_what_a_pipeline_leaves_that_was_stopped_before_its_first_run_is_removed(tmp_path):
    folder = tmp_path / "notes"
    (folder / "cache").mkdir(parents=True)
    with pytest.raises(ValueError, match="not a run"):  # not one of ours
        catalog.remove(folder)
    (folder / "cache" / "dialogues.jsonl").write_text("private", encoding="utf-8")
    (folder / "thesis").mkdir()
    with pytest.raises(ValueError, match=r"more than runs \(thesis\)"):
        catalog.remove(folder)
    (folder / "thesis").rmdir()
    make_run(folder / "base")  # what it would have been trained from
    catalog.remove(folder)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_removed(tmp_path, monkeypatch):
    run = make_run(tmp_path / "runs" / "a")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.yaml").write_text("theme: dark", encoding="utf-8")
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "runs" / "thesis").mkdir()
    cases = {"notes": "not a run", "link": "link", "runs": "more than runs", "nowhere": "no run"}
    for name, reason in cases.items():
        with pytest.raises(ValueError, match=reason):
            catalog.remove(tmp_path / name)
    with files.lock(run / "run.lock"), pytest.raises(ValueError, match="training into"):
        catalog.remove(run)
    monkeypatch.chdir(run)
    with pytest.raises(ValueError, match="working directory"):
        catalog.remove(run)
    assert (run / "config.yaml").exists() and (tmp_path / "notes/config.yaml").exists()


def test_a_run_in_use_is_training(tmp_path):
    run = make_run(tmp_path / "a")
    with files.lock(run / "run.lock"):
        assert RunInfo(run).state == "training"
    assert RunInfo(run).state == "stopped"


def refuse_stat(monkeypatch, name):
    """Let the size of files of this name be unreadable."""
    stat = os.stat

    def failing(path, **options):
        if not isinstance(path, int) and os.path.basename(path) == name:  # noqa: PTH119
            raise OSError(errno.EIO, "Input/output error", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", failing)


def test_sizes_that_cannot_be_read_are_unknown_and_reported(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", checkpoints=["best.pt", "latest.pt"])
    refuse_stat(monkeypatch, "best.pt")
    with pytest.warns(UserWarning, match=r"best\.pt.*Input/output error"):
        detail = RunInfo(run).detail
    assert detail["disk"] is None
    assert detail["checkpoints"] == {"best.pt": None, "latest.pt": 1000}


def test_a_folder_that_cannot_be_listed_has_no_known_size(tmp_path, monkeypatch):
    run, scandir = make_run(tmp_path / "a"), os.scandir

    def failing(path):
        if str(path).endswith("checkpoints"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.warns(UserWarning, match="checkpoints.*ermission"):
        assert disk_usage(run) is None


def test_files_that_disappear_meanwhile_have_no_size(tmp_path):
    run = make_run(tmp_path / "a")
    size = disk_usage(run)
    (run / "link").symlink_to("nowhere")
    assert disk_usage(run) == size + len("nowhere")
    assert disk_usage(tmp_path / "gone") == 0


def test_scores_that_cannot_be_stored_or_read_are_reported(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a", "task=pretrain", evals=[(1, {"val_pretrain": 3.0})])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no space")))
        with pytest.warns(UserWarning, match=r"eval\.json was not written: .*[Nn]o space"):
            store_scores(run, {"step": 2, "scores": {}})
    assert not (run / "eval.json").exists()
    (run / "eval.json").write_text("{", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"eval\.json"):
        assert RunInfo(run).bits_per_byte is None


def test_a_run_whose_only_file_cannot_be_read_is_listed(tmp_path, monkeypatch):
    run = make_run(tmp_path / "a")
    (run / "metrics.jsonl").unlink()
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EIO, "fault")))
    (summary,) = catalog.newest_first(tmp_path)
    assert (summary.state, "fault" in summary.problem) == ("damaged", True)
