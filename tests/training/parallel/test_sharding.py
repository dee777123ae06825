"""Runs in several processes: the losses of one process, whatever the task, the optimizer and the sharding."""

import dataclasses
import shutil
from itertools import chain

import pytest
import torch

from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import load_model, read_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system.processes import SINGLE_PROCESS, RankShare
from niels_gpt.training.loop import train
from niels_gpt.training.optim.optimizer import make_optimizer
from niels_gpt.training.parallel.sharding import clip_gradients, fill, state_tensors, ties
from niels_gpt.training.tasks.registry import open_task
from tests import token_caches
from tests.training import metric_lines, same, sentence, small_config, weights_sha256, worlds
from tests.training.worlds import digests, run_world

STEPS = 4
QUICK = ["train.B=8", "model.L=2", "model.dropout=0.0", f"train.total_steps={STEPS}"]
QUICK += ["output.checkpoint_every=100", "output.eval_every=2"]
KINDS = {
    2: {
        "adamw": ["train.precision=fp32"],
        "sft": ["train.accumulate=4"],
        "sharded-bf16": ["engine.shard=true", "train.accumulate=2", "train.precision=bf16"],
        "sharded-packed": ["engine.shard=true", "train.accumulate=4", "splice.content_length=3"],
    },
    4: {
        "muon": ["train.optimizer=muon", "train.accumulate=2"],
        "sharded-muon": ["engine.shard=true", "train.optimizer=muon", "model.C=18", "model.H=1"],  # uneven: 18 over 4
    },
}
PAIRS = [(size, kind) for size, kinds in KINDS.items() for kind in kinds]
NOT_RUN = {
    "frames": ["splice.packed=false", "splice.content_length=10", "model.positions=learned"],
    "packed": ["splice.content_length=10", "splice.balance_tau=0.5"],
}


@pytest.fixture(scope="module")
def configs(texts, tmp_path_factory):
    """One config of every kind, by name."""
    notes = tmp_path_factory.mktemp("splice") / "notes"
    notes.mkdir()
    for i in range(9):
        (notes / f"note_{i}.md").write_text(sentence(i, 5 + 2 * i), encoding="utf-8")
    splice = ["task=splice", "splice.num_docs=3", f"data.roam={notes}", "data.roam_val_frac=0.3", "model.T=24"]
    configs = {}
    for name, options in chain(*(kinds.items() for kinds in (*KINDS.values(), NOT_RUN))):
        if name == "sft":
            configs[name] = token_caches.small_config("sft", *QUICK, *options)
        else:
            extra = splice if "splice." in "".join(options) else []
            configs[name] = small_config(texts, *QUICK, *extra, *options)
    return configs


@pytest.fixture(scope="module")
def single(configs, tmp_path_factory):
    """Every kind in one process: (folder, digests of every step)."""
    folder, runs = tmp_path_factory.mktemp("one"), {}
    for _, name in PAIRS:
        config = dataclasses.replace(configs[name], engine=dataclasses.replace(configs[name].engine, shard=False))
        task, seen = worlds.watched(config)
        train(config, folder / name, task=task)
        runs[name] = (folder / name, seen)
    return runs


@pytest.fixture(scope="module")
def distributed(configs, tmp_path_factory):
    """Every kind in its number of processes: (folder, per rank the digests of every step)."""
    folder, runs = tmp_path_factory.mktemp("worlds"), {}
    for size, kinds in KINDS.items():
        by_rank = run_world(size, worlds.train_all, [(configs[name], folder / name, {}) for name in kinds])
        runs |= {name: (folder / name, [seen[i] for seen in by_rank]) for i, name in enumerate(kinds)}
    return runs


def column(folder, key="loss"):
    return [line[key] for line in metric_lines(folder)]


# --- one process and several -------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "kind"), PAIRS)
def test_losses_equal_those_of_one_process(single, distributed, size, kind):
    one, several = single[kind][0], distributed[kind][0]
    rough = 20 if "bf16" in kind else 1
    assert column(several) == pytest.approx(column(one), rel=rough * 2e-5)
    assert column(several, "grad_norm") == pytest.approx(column(one, "grad_norm"), rel=rough * 1e-3)
    assert column(several, "lr") == column(one, "lr")
    evals = [[line.get("evals", {}) for line in metric_lines(folder)] for folder in (one, several)]
    assert [e.keys() for e in evals[1]] == [e.keys() for e in evals[0]]
    assert all(mine == pytest.approx(theirs, rel=rough * 1e-4) for mine, theirs in zip(*evals, strict=True))
    assert any(evals[0])
    ours, theirs = (load_model(RunFolder(folder).best)[0].state_dict() for folder in (one, several))
    rounding = 2e-3 if "muon" in kind or rough > 1 else 1e-4  # Muon multiplies in bfloat16 where the processor can
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-3, atol=rounding)


@pytest.mark.parametrize(("size", "kind"), PAIRS)
def test_ranks_share_the_rows_of_each_step_in_order(single, distributed, size, kind):
    steps = single[kind][1]
    by_rank = distributed[kind][1]
    assert (len(steps), len(by_rank)) == (STEPS, size)
    for step, rows in enumerate(steps):
        shares = [seen[step] for seen in by_rank]
        if "packed" in kind:  # the frames hold other spans, but together the same
            assert sorted(chain(*shares)) == sorted(rows)
        else:
            assert list(chain(*shares)) == rows
        assert all(shares)
    assert len({tuple(rows) for rows in steps}) == STEPS


def test_only_the_main_process_writes(distributed):
    for folder, _ in distributed.values():
        run = RunFolder(folder)
        assert column(folder, "step") == list(range(STEPS))
        assert [path.name for path in run.samples.iterdir()] == [f"step_0000000{STEPS}.txt"]
        assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]
        assert run.read_config().train.B == 8


def test_ranks_draw_different_dropout_masks_and_agree_on_micro_batches(texts, tmp_path):
    config = small_config(texts, *QUICK, "model.dropout=0.3", "train.total_steps=3", "output.eval_every=100")
    alone = worlds.masks(SINGLE_PROCESS, config, tmp_path / "one")
    calls = [(worlds.masks, config, tmp_path / "two"), (worlds.agreed_micro_batches, small_config(texts, *QUICK))]
    (first, agreed), (second, also) = run_world(2, worlds.in_sequence, calls)
    assert len(alone) == len(set(alone)) == 3 * 5
    assert len(first) == len(second) == 4 * 5  # the warm-up pass of DDP draws too
    assert not set(first[5:]) & set(second[5:])
    assert agreed == also == 4  # as many as the rank with the least memory needs


# --- stop and resume ---------------------------------------------------------------------------------


def test_a_signal_to_one_rank_stops_all_and_the_run_resumes_bit_for_bit(texts, tmp_path):
    options = {"file": ["model.C=32"], "folder": ["engine.shard=true", "train.optimizer=muon"]}
    calls = []
    for name, more in options.items():
        config = small_config(texts, *QUICK, "model.dropout=0.2", "output.checkpoint_every=3", *more)
        calls.append((worlds.stop_and_resume, config, tmp_path / name, 1, 1, tmp_path / f"full {name}"))
    saved = [(2, "SIGTERM", path, STEPS, None) for path in ("latest.pt", "step_00000002")]
    assert run_world(2, worlds.in_sequence, calls) == [saved, saved]
    for name in options:
        full, stopped = (RunFolder(tmp_path / each) for each in (f"full {name}", name))
        assert metric_lines(stopped.path) == metric_lines(full.path)
        assert same(read_checkpoint(stopped.latest, "cpu"), read_checkpoint(full.latest, "cpu"))
        assert weights_sha256(stopped.best) == weights_sha256(full.best)


@pytest.fixture(scope="module")
def stopped(texts, tmp_path_factory):
    """Runs that stopped after 2 of 4 steps: "folder", sharded on two processes, and "file", of one process."""
    folder = tmp_path_factory.mktemp("stopped")
    config = small_config(texts, *QUICK, "output.checkpoint_every=1")
    shard = dataclasses.replace(config, engine=dataclasses.replace(config.engine, shard=True))
    run_world(2, worlds.stop, shard, folder / "folder", 1)
    worlds.stop(SINGLE_PROCESS, config, folder / "file", 1)
    train(config, folder / "full")
    return folder, config, shard


@pytest.mark.parametrize(
    ("kind", "size", "sharded"),
    [("folder", 4, True), ("folder", 1, False), ("file", 2, True)],
)
def test_a_checkpoint_resumes_with_another_number_of_processes(stopped, tmp_path, kind, size, sharded):
    root, config, shard = stopped
    folder = shutil.copytree(root / kind, tmp_path / "run", symlinks=True)
    config = shard if sharded else config
    if size == 1:
        notes = worlds.Notes()
        train(config, folder, report=notes, resume=True)
        assert notes.texts[0] == f"resuming {folder} at step 2"
        assert "from 2 to 1" in notes.texts[1] and "dropout" not in notes.texts[1]
    else:
        run_world(size, worlds.train_all, [(config, folder, {"resume": True})])
    run = RunFolder(folder)
    assert column(folder) == pytest.approx(column(root / "full"), rel=2e-5)
    assert run.latest.name == ("latest" if sharded else "latest.pt")
    names = sorted(path.name for path in run.checkpoints.iterdir())
    suffix = "" if sharded else ".pt"
    kept = [f"step_00000002{'' if kind == 'folder' else '.pt'}", *(f"step_0000000{i}{suffix}" for i in (3, 4))]
    assert names == sorted(["best.pt", "config.json", "latest" + suffix, *kept])
    ends = [read_checkpoint(end, "cpu") for end in (run.latest, RunFolder(root / "full").latest)]
    assert ends[0]["step"] == ends[1]["step"] == STEPS
    for name, weight in ends[1]["model"].items():
        torch.testing.assert_close(ends[0]["model"][name], weight, rtol=1e-3, atol=1e-4)
    for i, state in ends[1]["optimizer"]["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(ends[0]["optimizer"]["state"][i][key], value, rtol=1e-2, atol=1e-5)


def test_a_damaged_sharded_checkpoint_is_skipped(stopped, tmp_path):
    root, _, shard = stopped
    folder = shutil.copytree(root / "folder", tmp_path / "run", symlinks=True)
    damaged = RunFolder(folder).latest.resolve() / "__1_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 3] ^= 1
    damaged.write_bytes(data)
    main, other = run_world(2, worlds.resumed, shard, folder)
    assert other == []
    assert any("__1_0.distcp" in note and "checksum" in note for note in main)
    assert f"resuming {folder} at step 1" in main
    assert column(folder) == pytest.approx(column(root / "full"), rel=2e-5)


def test_a_kill_while_a_sharded_checkpoint_is_written_leaves_the_previous_one(texts, tmp_path):
    config = small_config(texts, *QUICK, "engine.shard=true", "output.checkpoint_every=1", "output.keep=1")
    results = run_world(2, worlds.killed_while_saving, config, tmp_path / "run", 2)
    assert results[1] == worlds.KILLED
    assert results[0][0] == "ConnectionError"
    run = RunFolder(tmp_path / "run")
    assert run.latest.resolve().name == "step_00000001"
    assert read_checkpoint(run.latest, "cpu")["step"] == 1
    assert [path.name for path in run.step_files()] == ["step_00000001"]
    assert [path.name for path in run.checkpoints.glob(".*")] == [".step_00000002.tmp"]
    run_world(2, worlds.train_all, [(config, run.path, {"resume": True}), (config, tmp_path / "full", {})])
    assert metric_lines(run.path) == metric_lines(tmp_path / "full")
    assert [path.name for path in run.step_files()] == ["step_00000004"]
    assert not list(run.checkpoints.glob(".*"))


# --- errors ------------------------------------------------------------------------------------------


def test_out_of_memory_on_one_rank_stops_all(texts, tmp_path):
    config = small_config(texts, *QUICK, "output.checkpoint_every=2", "train.B=9")
    first, second, third = run_world(3, worlds.run_out_of_memory, config, tmp_path / "run")
    assert second[0] == "ValueError"
    assert second[1].startswith("rank 1: out of memory; ")
    assert "--resume" in second[1] and "--set train.accumulate=3" in second[1]
    assert (first[0], third[0]) == ("ConnectionError", "ValueError")
    for _, message in (first, third):
        assert "another of the 3 processes" in message and "--resume" in message
    assert read_checkpoint(RunFolder(tmp_path / "run").latest, "cpu")["step"] == 2


def test_divergence_is_reported_by_the_main_process(texts, tmp_path):
    config = small_config(texts, *QUICK, "train.base_lr=1e30", "train.min_lr=1e30", "train.clip_norm=1e30")
    first, second = run_world(2, worlds.train_all, [(config, tmp_path / "run", {})])
    assert first[0] == "TrainingDiverged"
    assert second[0] == "ValueError" and "another of the 2 processes" in second[1]


# --- without processes -------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "kind"), [(2, "adamw"), (4, "sft"), (8, "frames"), (8, "packed")])
def test_the_shares_of_a_batch_are_its_rows(configs, kind, size):
    task = open_task(configs[kind])
    for step in (0, 3):
        full = task.batch(step)
        shares = [task.batch(step, RankShare(rank, size)) for rank in range(size)]
        if kind == "packed":  # each share is packed separately
            assert sorted(chain(*map(digests, shares))) == sorted(digests(full))
            assert {len(digests(share)) for share in shares} == {8 // size}
        else:
            for i in range(2):
                assert torch.equal(torch.cat([share[i] for share in shares]), full[i])


def test_gradients_are_clipped_to_the_limit():
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (2, 1, 3)]
    weights[0].grad, weights[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])  # the third has no gradient
    assert clip_gradients(weights, 10.0).item() == pytest.approx(5.0)
    assert weights[1].grad.item() == 4.0
    assert clip_gradients(iter(weights), 1.0).item() == pytest.approx(5.0)
    assert weights[0].grad.tolist() == pytest.approx([0.6, 0.0])
    assert weights[1].grad.item() == pytest.approx(0.8)


def test_the_state_tensors_of_a_run_are_filled_in_place(texts):
    config = small_config(texts)
    models = [GPT(config.model) for _ in range(2)]
    first, second = ((model, make_optimizer(model, config.train)) for model in models)
    rates = [group["lr"] for group in first[1].param_groups]
    tensors = state_tensors(*first)
    assert [group["lr"] for group in first[1].param_groups] == rates
    assert ties(models[0]) == {"lm_head.weight": "tok_emb.weight"}
    assert "model/lm_head.weight" not in tensors
    assert tensors["model/tok_emb.weight"].data_ptr() == models[0].tok_emb.weight.data_ptr()
    assert all(tensor.eq(0).all() for name, tensor in tensors.items() if name.endswith(("exp_avg", "exp_avg_sq")))
    fill(tensors, {name: torch.full_like(tensor, 3.0) for name, tensor in tensors.items()})
    assert all(weight.eq(3).all() for weight in models[0].parameters())
    fill(tensors, state_tensors(*second))
    assert same(models[0].state_dict(), models[1].state_dict())
