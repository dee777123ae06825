"""Several processes give what one gives: the same rows, the same losses, checkpoints that fit any number of them.

The processes are real and talk over gloo on the CPU; the reference is the loop in one process.
"""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import load_model, read_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system.processes import (
    SINGLE_PROCESS,
    RankShare,
    World,
    check_single_process,
    device_of_rank,
    open_world,
)
from niels_gpt.training.loop import train
from niels_gpt.training.optim.optimizer import make_optimizer
from niels_gpt.training.parallel.agreement import check_rows
from niels_gpt.training.resume import TrainState, sharded_content
from niels_gpt.training.tasks.registry import open_task
from tests import token_caches
from tests.training import metric_lines, same, sentence, small_config, weights_sha256, worlds, write_texts
from tests.training.worlds import digests, run_world

ROOT = Path(__file__).parents[2]
QUICK = ["train.B=8", "model.L=2", "model.dropout=0.0", "train.total_steps=6", "output.checkpoint_every=100"]
KINDS = {
    "adamw": ["train.precision=fp32"],
    "muon": ["train.optimizer=muon", "train.accumulate=2"],
    "sft": ["train.accumulate=4"],
    "packed": ["splice.content_length=10", "splice.balance_tau=0.5"],
    "frames": ["splice.packed=false", "splice.content_length=10", "model.positions=learned"],
    "sharded": ["engine.shard=true", "train.accumulate=2"],
    "sharded-bf16": ["engine.shard=true", "train.accumulate=2", "train.precision=bf16"],
    "sharded-muon": ["engine.shard=true", "train.optimizer=muon", "model.C=18", "model.H=1"],  # 18 rows on 4 processes
    "sharded-packed": ["engine.shard=true", "train.accumulate=4", "splice.content_length=3"],
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "data")


@pytest.fixture(scope="module")
def configs(texts, tmp_path_factory):
    """One of every kind of run."""
    notes = tmp_path_factory.mktemp("splice") / "notes"
    notes.mkdir()
    for i in range(9):
        (notes / f"note_{i}.md").write_text(sentence(i, 5 + 2 * i), encoding="utf-8")
    splice = ["task=splice", "splice.num_docs=3", f"data.roam={notes}", "data.roam_val_frac=0.3", "model.T=24"]
    made = {}
    for name, options in KINDS.items():
        if name == "sft":
            made[name] = token_caches.small_config("sft", *QUICK, *options)
        else:
            own = splice if "splice." in "".join(options) else []
            made[name] = small_config(texts, *QUICK, *own, *options)
    return made


@pytest.fixture(scope="module")
def one(configs, tmp_path_factory):
    """Every kind in one process: (folder, what each step learned from)."""
    place, found = tmp_path_factory.mktemp("one"), {}
    for name, config in configs.items():
        task, seen = worlds.watched(config)
        train(config, RunFolder(place / name), task=task)
        found[name] = (place / name, seen)
    return found


@pytest.fixture(scope="module", params=[2, 4])
def several(configs, tmp_path_factory, request):
    """Every kind in several processes: (folder, per rank what each step learned from)."""
    place = tmp_path_factory.mktemp(f"world-{request.param}")
    runs = [(config, place / name, {}) for name, config in configs.items()]
    by_rank = run_world(request.param, worlds.train_all, runs)
    return {name: (place / name, [seen[i] for seen in by_rank]) for i, name in enumerate(configs)}


def numbers(folder, key="loss"):
    return [line[key] for line in metric_lines(folder)]


# --- one process and many ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_curve_is_that_of_one_process(one, several, kind):
    here, there = one[kind][0], several[kind][0]
    rough = 20 if "bf16" in kind else 1
    assert numbers(there) == pytest.approx(numbers(here), rel=rough * 2e-5)
    assert numbers(there, "grad_norm") == pytest.approx(numbers(here, "grad_norm"), rel=rough * 1e-3)
    assert numbers(there, "lr") == numbers(here, "lr")
    evals = [[line.get("evals", {}) for line in metric_lines(folder)] for folder in (here, there)]
    assert [e.keys() for e in evals[1]] == [e.keys() for e in evals[0]]
    assert all(mine == pytest.approx(theirs, rel=rough * 1e-4) for mine, theirs in zip(*evals, strict=True))
    assert any(evals[0])
    ours, theirs = (load_model(RunFolder(folder).best)[0].state_dict() for folder in (here, there))
    rounding = 2e-3 if "muon" in kind or rough > 1 else 1e-4  # Muon multiplies in bfloat16 where the processor can
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-3, atol=rounding)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_a_step_are_those_of_one_process_shared_out_in_order(one, several, kind):
    steps = one[kind][1]
    by_rank = several[kind][1]
    assert len(steps) == 6
    for step, rows in enumerate(steps):
        shares = [seen[step] for seen in by_rank]
        if "packed" in kind:  # frames hold other spans, but together the same
            assert sorted(chain(*shares)) == sorted(rows)
        else:
            assert list(chain(*shares)) == rows
        assert all(shares)
    assert len({tuple(rows) for rows in steps}) == 6


def test_only_one_process_writes(several):
    """What the others would write would come twice, or in between."""
    for folder, _ in several.values():
        run = RunFolder(folder)
        assert [line["step"] for line in metric_lines(folder)] == list(range(6))
        assert [path.name for path in run.samples.iterdir()] == ["step_00000006.txt"]
        assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]
        assert run.read_config().train.B == 8


def test_each_process_drops_other_things(texts, tmp_path):
    config = small_config(texts, *QUICK, "model.dropout=0.3", "train.total_steps=3", "output.eval_every=100")
    alone = worlds.masks(SINGLE_PROCESS, config, tmp_path / "one")
    first, second = run_world(2, worlds.masks, config, tmp_path / "two")
    assert len(alone) == len(set(alone)) == 3 * 5
    # The pass before the first update draws too.
    assert len(first) == len(second) == 4 * 5
    assert not set(first[5:]) & set(second[5:])


# --- stopping and going on ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "rank", "options"),
    [
        (4, 2, ["model.dropout=0.2", "model.C=32"]),
        (2, 1, ["model.dropout=0.2", "engine.shard=true", "train.optimizer=muon"]),
    ],
)
def test_a_signal_to_any_process_stops_all_and_the_run_goes_on_bit_for_bit(texts, tmp_path, size, rank, options):
    config = small_config(texts, *QUICK, "output.checkpoint_every=4", *options)
    found = run_world(size, worlds.stop_and_resume, config, tmp_path / "stopped", 2, rank, tmp_path / "whole")
    sharded = "engine.shard=true" in options
    assert found == [(3, "SIGTERM", "step_00000003" if sharded else "latest.pt", 6, None)] * size
    assert metric_lines(tmp_path / "stopped") == metric_lines(tmp_path / "whole")
    whole, stopped = (RunFolder(tmp_path / name) for name in ("whole", "stopped"))
    assert same(read_checkpoint(stopped.latest, "cpu"), read_checkpoint(whole.latest, "cpu"))
    assert weights_sha256(stopped.best) == weights_sha256(whole.best)


@pytest.fixture(scope="module")
def stopped(texts, tmp_path_factory):
    """Runs that were stopped after 3 of 6 updates: sharded on two processes, and a single file of one."""
    place = tmp_path_factory.mktemp("stopped")
    config = small_config(texts, *QUICK, "output.checkpoint_every=1")
    shard = dataclasses.replace(config, engine=dataclasses.replace(config.engine, shard=True))
    run_world(2, worlds.stop, shard, place / "folder", 2)
    worlds.stop(SINGLE_PROCESS, config, place / "file", 2)
    train(config, RunFolder(place / "whole"))
    return place, config, shard


@pytest.mark.parametrize(
    ("kind", "size", "sharded"),
    [("folder", 4, True), ("folder", 2, False), ("folder", 1, False), ("file", 2, True)],
)
def test_a_checkpoint_of_some_processes_goes_on_with_others(stopped, tmp_path, kind, size, sharded):
    place, config, shard = stopped
    folder = shutil.copytree(place / kind, tmp_path / "run", symlinks=True)
    options = {"resume": True}
    if size == 1:
        notes = worlds.Notes()
        train(config, RunFolder(folder), report=notes, **options)
        assert notes.texts == [f"resuming {folder} at step 3", "processes: it had 2, now 1; the same rows"]
    else:
        run_world(size, worlds.train_all, [(shard if sharded else config, folder, options)])
    run = RunFolder(folder)
    assert numbers(folder) == pytest.approx(numbers(place / "whole"), rel=2e-5)
    assert run.latest.name == ("latest" if sharded else "latest.pt")
    names = sorted(path.name for path in run.checkpoints.iterdir())
    tail = "" if sharded else ".pt"
    pointer = "latest" + tail
    assert names == sorted(["best.pt", "config.json", pointer, *(f"step_0000000{i}{tail}" for i in (4, 5, 6))])
    ends = [read_checkpoint(end, "cpu") for end in (run.latest, RunFolder(place / "whole").latest)]
    assert ends[0]["step"] == ends[1]["step"] == 6
    for name, weight in ends[1]["model"].items():
        torch.testing.assert_close(ends[0]["model"][name], weight, rtol=1e-3, atol=1e-4)
    for i, state in ends[1]["optimizer"]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(ends[0]["optimizer"]["state"][i][key], value, rtol=1e-2, atol=1e-5)


def test_a_damaged_folder_goes_back_to_the_one_before(stopped, tmp_path):
    place, _, shard = stopped
    folder = shutil.copytree(place / "folder", tmp_path / "run", symlinks=True)
    damaged = RunFolder(folder).latest.resolve() / "__1_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 3] ^= 1
    damaged.write_bytes(data)
    main, other = run_world(2, worlds.resumed, shard, folder)
    assert other == []
    assert any("step_00000003" in note or "latest" in note for note in main)
    assert any("__1_0.distcp is wrong" in note and "going back" in note for note in main)
    assert f"resuming {folder} at step 2" in main
    assert numbers(folder) == pytest.approx(numbers(place / "whole"), rel=2e-5)


def test_a_kill_while_a_folder_is_written_leaves_the_one_before(texts, tmp_path):
    """The process dies in the writing of the second checkpoint: the first is the newest, and the half one is gone."""
    options = ["engine.shard=true", "output.checkpoint_every=2", "output.keep=1"]
    config = small_config(texts, *QUICK, *options)
    found = run_world(2, worlds.killed_while_saving, config, tmp_path / "run", 2)
    assert found[1] == ("EOFError", "it was killed")
    assert found[0][0] == "ConnectionError"
    run = RunFolder(tmp_path / "run")
    assert run.latest.resolve().name == "step_00000002"
    assert read_checkpoint(run.latest, "cpu")["step"] == 2
    assert [path.name for path in run.step_files()] == ["step_00000002"]
    assert [path.name for path in run.checkpoints.glob(".*")] == [".step_00000004.tmp"]
    run_world(2, worlds.train_all, [(config, run.path, {"resume": True}), (config, tmp_path / "whole", {})])
    assert metric_lines(run.path) == metric_lines(tmp_path / "whole")
    assert [path.name for path in run.step_files()] == ["step_00000006"]
    assert not list(run.checkpoints.glob(".*"))


# --- what goes wrong ---------------------------------------------------------------------------------


def test_processes_that_differ_are_refused_and_one_says_so(texts, tmp_path):
    config = small_config(texts, *QUICK)
    shutil.copytree(texts, tmp_path / "other")
    (tmp_path / "other/notes/note_03.md").write_text("# another note\n\n" + sentence(77, 80), encoding="utf-8")
    others = {
        "train.seed is 7 on rank 0 and 8 on rank 1": small_config(texts, *QUICK, "train.seed=8"),
        "output.eval_every is 3 on rank 0 and 2 on rank 1": small_config(texts, *QUICK, "output.eval_every=2"),
        "the data of roam is": small_config(tmp_path / "other", *QUICK),
    }
    odd = small_config(texts, *QUICK, "train.B=9")
    pairs = [*((config, other) for other in others.values()), (odd, odd), (config, config)]
    first, second = run_world(2, worlds.refused, pairs, tmp_path)
    wanted = [*others, "train.B=9 rows do not share out over 2 processes", "--run-dir is"]
    for message, said in zip(wanted, first, strict=True):
        assert message in said
    assert second == ["silent"] * 5
    assert not any(path.name.startswith("run") for path in tmp_path.iterdir())


def test_where_files_lie_may_differ(texts, tmp_path):
    shutil.copytree(texts, tmp_path / "elsewhere")
    configs = [small_config(place, *QUICK) for place in (texts, tmp_path / "elsewhere")]
    assert run_world(2, worlds.refused, [configs], tmp_path) == [["ok"], ["ok"]]


def test_a_process_that_fails_or_has_no_room_stops_all(texts, tmp_path):
    config = small_config(texts, *QUICK, "output.checkpoint_every=2")
    for kind, said in (("memory", "no room; go on with --resume and --set train.accumulate=2"), ("bug", "a bug")):
        found = run_world(3 if kind == "bug" else 2, worlds.failing, _for(config, kind), tmp_path / kind, kind)
        assert found[1][0] == "ValueError"
        assert said in found[1][1]
        assert found[1][1].startswith("rank 1: ")
        for rank in set(range(len(found))) - {1}:
            name, text = found[rank]
            assert name == ("ConnectionError" if rank == 0 else "ValueError")
            assert "another of the" in text and "goes on with --resume" in text
        assert read_checkpoint(RunFolder(tmp_path / kind).latest, "cpu")["step"] == 2


def _for(config, kind):
    """The same config with a batch that three processes share."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, B=9)) if kind == "bug" else config


def test_a_diverging_run_is_named_once(texts, tmp_path):
    config = small_config(texts, *QUICK, "train.base_lr=1e30", "train.min_lr=1e30", "train.clip_norm=1e30")
    first, second = run_world(2, worlds.train_all, [(config, tmp_path / "run", {})])
    assert first[0] == "TrainingDiverged"
    assert second[0] == "ValueError" and "another of the 2 processes" in second[1]


def test_the_least_room_decides_for_all(texts):
    assert run_world(2, worlds.parts_that_fit, small_config(texts, *QUICK)) == [4, 4]


def test_rows_that_cannot_be_shared_out(texts):
    config = small_config(texts, "train.B=6")
    for size in (1, 2, 3, 6):
        check_rows(config, World(size=size))
    with pytest.raises(ValueError, match=r"train.B=6 .* 4 processes: take train.B=4 or 8, or one of 1, 2, 3, 6 proc"):
        check_rows(config, World(size=4))
    with pytest.raises(ValueError, match=r"take train\.B=8, or"):
        check_rows(config, World(size=8))


# --- without processes -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pointers_and_retention_hold_for_folders_and_files_alike(texts, tmp_path):
    run, model = RunFolder(tmp_path / "run"), GPT(small_config(texts).model)
    state = TrainState(model, make_optimizer(model, small_config(texts).train))
    extra = {"best": None, "data": {}, "config": {}}

    def names():
        return sorted(path.name for path in run.checkpoints.iterdir())

    def save(step, *, sharded):
        state.step = step
        if sharded:
            run.save_sharded(*sharded_content(state, extra), SINGLE_PROCESS, keep=2)
        else:
            run.save(model, state.optimizer, step, extra, numbered=True, best=False, keep=2)
        path, saved, damaged = run.newest_checkpoint("cpu")
        assert (path, saved["step"], damaged) == (run.latest, step, [])
        assert same(saved["model"], model.state_dict())

    with run.lock():
        for step in (1, 2, 3):
            save(step, sharded=True)
            with torch.no_grad():
                model.norm.weight.add_(1)
        assert names() == ["latest", "step_00000002", "step_00000003"]
        save(4, sharded=False)
        assert names() == ["config.json", "latest.pt", "step_00000003", "step_00000004.pt"]
        before = (run.checkpoints / "latest.pt").read_bytes()
        save(5, sharded=True)
        assert names() == ["config.json", "latest", "step_00000004.pt", "step_00000005"]
        # Killed between the two pointers: the newer counts.
        (run.checkpoints / "latest.pt").write_bytes(before)
        os.utime(run.checkpoints / "latest.pt", (1, 1))
        assert run.newest_checkpoint("cpu")[1]["step"] == 5
        os.utime(run.checkpoints / "latest.pt", (2**33, 2**33))
        assert run.newest_checkpoint("cpu")[1]["step"] == 4
        shutil.rmtree(run.checkpoints / "step_00000005")  # and a pointer to nothing is none
        (run.checkpoints / "latest.pt").unlink()
        assert run.newest_checkpoint("cpu")[0].name == "step_00000004.pt"


@given(st.integers(0, 200), st.integers(1, 40))
def test_shares_follow_each_other_and_are_even(number, size):
    rows = list(range(number))
    parts = [rows[RankShare(rank, size).rows(number)] for rank in range(size)]
    assert list(chain(*parts)) == rows
    assert max(map(len, parts)) - min(map(len, parts)) <= (0 if number % size == 0 else 1)


def test_alone_everything_is_at_hand():
    tensor = torch.ones(2)
    assert SINGLE_PROCESS.all_reduce(tensor) is tensor
    assert SINGLE_PROCESS.is_main and SINGLE_PROCESS.share == RankShare(0, 1)
    nats, table = SINGLE_PROCESS.sum_arrays(1.5, np.arange(4).reshape(2, 2))
    assert (float(nats), table.tolist()) == (1.5, [[0, 1], [2, 3]])
    assert SINGLE_PROCESS.max(3) == 3
    assert SINGLE_PROCESS.all_gather("a") == ["a"]
    assert SINGLE_PROCESS.broadcast("a") == "a"
    assert SINGLE_PROCESS.main_first(lambda: 7) == 7
    SINGLE_PROCESS.barrier()
    with pytest.raises(KeyError, match="b"), SINGLE_PROCESS.fail_together():
        raise KeyError("b")
    assert not torch.distributed.is_initialized()


def test_a_world_from_the_environment(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    with open_world("cpu") as world:
        assert world == World(device="cpu")
        check_single_process(world)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    with open_world("cpu") as world:
        assert (world.size, world.restarts) == (1, 2)
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="not RANK: start several processes with torchrun"), open_world("cpu"):
        pass
    with pytest.raises(ValueError, match="start this one alone"):
        check_single_process(SINGLE_PROCESS)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a number, got 'two'"), open_world("cpu"):
        pass


def test_each_process_has_a_device_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of_rank("cpu", 7) == "cpu"
    assert [device_of_rank("cuda", local) for local in (0, 1)] == ["cuda:0", "cuda:1"]
    with pytest.raises(ValueError, match="no GPU: there are 2; --nproc-per-node=2"):
        device_of_rank("cuda", 2)
    for device in ("mps", "cuda:0"):
        with pytest.raises(ValueError, match=f"not on {device}"):
            device_of_rank(device, 0)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kind", ["adamw", "sft", "frames"])
def test_the_shares_of_a_batch_are_its_rows(configs, kind, size):
    task = open_task(configs[kind])
    for step in (0, 5):
        whole = task.batch(step)
        parts = [task.batch(step, RankShare(rank, size)) for rank in range(size)]
        for i, column in enumerate(whole[:2]):
            assert torch.equal(torch.cat([part[i] for part in parts]), column)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_shares_of_a_packed_batch_are_its_spans(configs, size):
    task = open_task(configs["packed"])
    for step in (0, 5):
        parts = [task.batch(step, RankShare(rank, size)) for rank in range(size)]
        assert sorted(chain(*map(digests, parts))) == sorted(digests(task.batch(step)))
        assert {len(digests(part)) for part in parts} == {8 // size}


def test_one_process_loads_nothing_for_several():
    names = tuple(f"torch.distributed.{name}" for name in ("checkpoint", "fsdp", "tensor"))
    code = f"import sys, niels_gpt.cli.train; print([name for name in sys.modules if name.startswith({names})])"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_signal_has_its_name(texts, tmp_path, number):
    assert worlds.stop(SINGLE_PROCESS, small_config(texts, *QUICK), tmp_path / "run", 1, number=number) == (
        2,
        number.name,
    )
