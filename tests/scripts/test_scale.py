"""The simulation of data path and failures, compared with closed forms."""

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from niels_gpt.config import ModelConfig
from niels_gpt.config.schema import PRESETS
from niels_gpt.training.throughput import flops_per_token
from scripts import scale
from scripts.scale import (
    MODELS,
    Rates,
    choose_engine,
    daly_interval,
    expected_goodput,
    make_plan,
    poisson_gaps,
    read_bytes,
    run_with_failures,
    simulate_pipeline,
    slowest_steps,
    young_interval,
)

ROOT = Path(__file__).parents[2]


def simulated(interval, cost, restart, mtbf, *, failures=3000, seed=0):
    """The goodput of one long run, in which about so many failures happen."""
    work = failures * mtbf
    seconds, _ = run_with_failures(work, interval, cost, restart, poisson_gaps(mtbf, np.random.default_rng(seed)))
    return work / seconds


# --- failures ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "cost"), [(100.0, 10.0), (37.0, 0.5), (5.0, 5.0)])
def test_without_failures_the_goodput_is_1_less_the_share_of_checkpoints(interval, cost):
    seconds, failures = run_with_failures(1000 * interval, interval, cost, 60.0, [math.inf])
    assert failures == 0
    assert 1000 * interval / seconds == pytest.approx(1 - cost / (interval + cost))
    assert expected_goodput(interval, cost, 60.0, math.inf) == pytest.approx(1 - cost / (interval + cost))


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([math.inf], 33.0),  # 3 x (10 + 1)
        ([25.0, math.inf], 25 + 4 + 11),  # two checkpoints, 3 s lost, restart, the third part
        ([22.0, math.inf], 22 + 4 + 11),  # right after the second checkpoint: nothing lost
        ([21.9, math.inf], 21.9 + 4 + 22),  # while it is being written
        ([25.0, 3.0, math.inf], 25 + 3 + 4 + 11),  # again during the restart
        ([5.0, 14.9, 15.0, math.inf], 5 + 14.9 + 15 + 4 + 22),  # 14.9 is a restart and a part less 0.1 s
    ],
)
def test_a_run_with_failures_by_hand(gaps, expected):
    seconds, failures = run_with_failures(30.0, 10.0, 1.0, 4.0, gaps)
    assert seconds == pytest.approx(expected) and failures == len(gaps) - 1


def test_an_incomplete_last_interval_also_ends_with_a_checkpoint():
    assert run_with_failures(25.0, 10.0, 1.0, 4.0, [math.inf])[0] == 28.0


def test_failures_that_end_before_the_run_are_refused():
    with pytest.raises(ValueError, match="2 failures"):
        run_with_failures(30.0, 10.0, 1.0, 4.0, [5.0, 5.0])


@pytest.mark.parametrize(
    ("interval", "cost", "restart", "mtbf"),
    [(600.0, 20.0, 300.0, 3600.0), (100.0, 50.0, 10.0, 500.0), (1500.0, 60.0, 0.0, 1000.0)],
)
def test_the_simulated_goodput_is_that_of_the_closed_form(interval, cost, restart, mtbf):
    expected = expected_goodput(interval, cost, restart, mtbf)
    assert simulated(interval, cost, restart, mtbf, failures=20_000) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("cost", "restart", "mtbf"), [(20.0, 300.0, 3600.0), (4.2, 300.0, 44_000.0), (60, 60, 1200)])
def test_the_interval_of_daly_is_the_simulated_optimum(cost, restart, mtbf):
    def mean(interval):
        return np.mean([simulated(interval, cost, restart, mtbf, seed=seed) for seed in range(3)])

    intervals = young_interval(cost, mtbf) * np.geomspace(0.25, 4, 17)
    goodputs = [mean(interval) for interval in intervals]
    daly = daly_interval(cost, mtbf)
    at_daly = mean(daly)
    assert at_daly > 0.995 * max(goodputs)
    # The optimum is flat, so the best of the intervals is a matter of chance: fit a polynomial to all of them.
    fit = np.polyfit(np.log(intervals), goodputs, 4)
    fine = np.linspace(np.log(intervals[0]), np.log(intervals[-1]), 2001)
    assert math.exp(fine[np.polyval(fit, fine).argmax()]) == pytest.approx(daly, rel=0.03)


def test_the_interval_of_daly_maximizes_the_closed_form():
    cost, mtbf = 30.0, 5000.0
    intervals = np.linspace(50, 3000, 20_001)
    best = intervals[np.argmax([expected_goodput(t, cost, 100.0, mtbf) for t in intervals])]
    assert daly_interval(cost, mtbf) == pytest.approx(best, rel=0.01)


def test_hopeless_failure_rates_give_no_goodput_instead_of_an_overflow():
    assert expected_goodput(1e6, 1.0, 1.0, 1.0) == 0.0
    assert expected_goodput(1.0, 1.0, 1e6, 1.0) == 0.0


# --- data path ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", list(itertools.permutations([0.5, 2.0, 1.0])))
def test_the_throughput_is_that_of_the_slowest_stage(seconds):
    stages = [np.full((300, 1), s) for s in seconds]
    per_item, wait = simulate_pipeline(stages, buffer=2)
    assert per_item == pytest.approx(max(seconds))
    assert wait == pytest.approx(1 - seconds[-1] / max(seconds))


def test_without_a_buffer_the_stages_take_turns():
    per_item, wait = simulate_pipeline([np.full((50, 1), 1.0), np.full((50, 1), 3.0)], buffer=0)
    assert per_item == pytest.approx(4.0) and wait == pytest.approx(0.25)


def test_an_item_waits_for_all_lanes():
    lanes = np.tile([1.0, 5.0, 2.0], (100, 1))
    assert simulate_pipeline([lanes, np.full((100, 1), 0.5)], buffer=2)[0] == pytest.approx(5.0)


def test_random_stages_match_a_queue_computed_item_by_item():
    rng = np.random.default_rng(1)
    build, train = rng.exponential(1.0, (500, 1)), rng.exponential(1.1, (500, 1))
    built, taken, trained = [], [], []  # moments
    for i in range(500):
        begin = max(built[-1] if built else 0.0, taken[i - 2] if i >= 2 else 0.0)
        built.append(begin + build[i, 0])
        taken.append(max(built[i], trained[-1] if trained else 0.0))
        trained.append(taken[i] + train[i, 0])
    assert simulate_pipeline([build, train], 2)[0] == pytest.approx((trained[-1] - trained[3]) / 496)


def test_the_slowest_of_many_processes():
    rng = np.random.default_rng(0)
    assert slowest_steps(2.0, 0.1, 1, 200_000, rng).mean() == pytest.approx(2.0, rel=1e-3)
    two = slowest_steps(1.0, 0.01, 2, 200_000, rng).mean()
    assert two - 1 == pytest.approx(0.01 / math.sqrt(math.pi), rel=0.02)  # the larger of two normal variables
    assert (slowest_steps(1.0, 0.0, 4096, 3, rng) == 1.0).all()


# --- plans -------------------------------------------------------------------------------------------


def test_flops_are_those_that_training_reports():
    for name in ("v0", "v1"):
        config, model = ModelConfig(**PRESETS[name]), MODELS[name]
        assert (model.L, model.C, model.T) == (config.L, config.C, config.T)
        assert model.flops == flops_per_token(config, int(model.weights))


@pytest.mark.parametrize(
    ("model", "gpus", "engine"),
    [
        ("124m", 1, "one process"),
        ("124m", 256, "DDP"),
        ("124m", 4096, "Levanter"),
        ("8b", 1, ""),
        ("8b", 8, "FSDP2"),
        ("8b", 4096, "Levanter"),
        ("70b", 8, ""),
        ("70b", 256, "Levanter"),  # evaluation would gather 280 GB on each GPU
    ],
)
def test_the_engine(model, gpus, engine):
    assert choose_engine(MODELS[model], gpus, Rates()) == engine


def test_a_plan_of_one_gpu_by_hand():
    rates = dataclasses.replace(Rates(), jitter=0.0, failures_per_gpu_day=0.0)
    plan = make_plan(MODELS["124m"], 1, 10e9, rates)
    assert plan.tokens == pytest.approx(10e9 / 3.7)
    assert plan.step_seconds == pytest.approx(64 * 1024 / 0.58e6)
    assert plan.data_wait == pytest.approx(0)
    assert plan.checkpoint_seconds == pytest.approx(12 * 124e6 / 0.33e9)
    steps = math.ceil(plan.tokens / 65536)
    assert plan.days * 86400 == pytest.approx(steps * plan.step_seconds + plan.checkpoint_seconds)  # one at the end
    assert plan.goodput == pytest.approx(plan.goodput_formula)


def test_a_slow_data_path_limits_the_step():
    rates = dataclasses.replace(Rates(), jitter=0.0, node_disk=1e9, node_memory=1e9, store_latency_s=0.01)
    plan = make_plan(MODELS["v1"], 1, 1e12, rates)
    assert plan.layout == scale.SHARED
    assert plan.step_seconds == pytest.approx(plan.build_seconds, rel=0.02)
    assert plan.data_wait == pytest.approx(1 - plan.compute_seconds / plan.build_seconds, abs=0.02)


@pytest.mark.parametrize(
    ("model", "gpus", "text", "layout"),
    [
        ("v1", 256, 100e9, scale.MEMORY),
        ("v1", 8, 10e12, scale.DISK),
        ("v1", 256, 10e12, scale.DISK),  # 61 reads of 2 ms would take longer than a step
        ("8b", 256, 10e12, scale.SHARED),  # two reads are hidden by a step of a second
        ("v1", 256, 100e12, scale.SHARED),  # no node can hold it
    ],
)
def test_the_layout_of_the_cache(model, gpus, text, layout):
    plan = make_plan(MODELS[model], gpus, text, Rates())
    assert plan.layout == layout
    copied = plan.cache_bytes / 5e9 if gpus == 256 and layout != scale.SHARED else 0.0
    assert plan.copy_seconds == pytest.approx(copied)


@pytest.mark.parametrize(
    ("model", "engine", "gpus", "seconds"),
    [
        ("124m", "one process", 1, 0.0),
        ("124m", "DDP", 8, 2 * 7 / 8 * 4 * 124e6 / 360e9),  # all-reduce: each GPU sends and receives 2 (W - 1) / W
        ("8b", "FSDP2", 256, 3 * 255 / 256 * 4 * 8e9 / 320e9),  # gather, gather, reduce-scatter
        ("8b", "Levanter", 64, 3 * 2 * 8e9 / 320e9),
        ("8b", "Levanter", 4096, 3 * 2 * 8e9 / 320e9 + 2 * 4 * 8e9 / 64 / 320e9),
    ],
)
def test_the_bytes_of_collectives(model, engine, gpus, seconds):
    rates = dataclasses.replace(Rates(), hop_s=0.0)
    assert scale.communication_seconds(engine, MODELS[model], gpus, rates) == pytest.approx(seconds)


def test_communication_counts_where_nothing_hides_it():
    rates = dataclasses.replace(Rates(), jitter=0.0, hop_s=0.0, node_bus_bytes_per_s=1e9)
    plan = make_plan(MODELS["124m"], 8, 1e9, rates)
    compute = 64 * 1024 / 0.58e6
    assert plan.step_seconds == pytest.approx(compute + 2 * 7 / 8 * 4 * 124e6 / 1e9 - 2 / 3 * compute)


def test_the_exchange_of_the_hosts_counts_where_it_is_longer_than_the_step():
    rates = dataclasses.replace(Rates(), jitter=0.0)
    fast = dataclasses.replace(rates, control_hop_s=1e-6)
    assert make_plan(MODELS["v1"], 256, 1e10, rates).step_seconds == pytest.approx(2 * 255 * 0.15e-3)
    assert make_plan(MODELS["v1"], 256, 1e10, fast).step_seconds == pytest.approx(61 * 1024 / 1.69e6)


def test_cache_builds_run_at_the_rate_of_the_slowest_stage():
    rates = Rates()
    assert scale.cache_build(1e12, 1, rates) == ("read", pytest.approx(1e12 / 40e6))  # one process reads
    fast_read = dataclasses.replace(rates, reader_bytes_per_s=1e9)
    assert scale.cache_build(1e12, 1, fast_read) == ("tokenize", pytest.approx(1e12 / 3.7 / (12 * 2.4e6)))
    slow_write = dataclasses.replace(fast_read, write_bytes_per_s=1e6)
    assert scale.cache_build(1e12, 1, slow_write) == ("write", pytest.approx(1e12 / 3.7 * 2 / 1e6))


def test_the_driver_of_a_ray_build_limits_it_however_many_nodes_there_are():
    rates = Rates()
    per_byte = 3 / 280e6 + 1 / (54e6 * 3.7)  # rows of three passes; tokens of the last
    for gpus in (64, 4096):
        limit, seconds = scale.cache_build(1e12, gpus, rates)
        assert limit == "driver"
        assert seconds == pytest.approx(1e12 * per_byte, rel=0.01)  # the rest: hashing, by the nodes
    quick = dataclasses.replace(rates, driver_rows_bytes_per_s=1e12, driver_tokens_per_s=1e12)
    slow_disk = dataclasses.replace(quick, write_bytes_per_s=1e8)  # the driver writes alone
    assert [scale.cache_build(1e12, gpus, slow_disk)[0] for gpus in (16, 64)] == ["write", "write"]
    assert scale.cache_build(1e12, 64, slow_disk)[1] == pytest.approx(1e12 / 3.7 * 2 / 1e8, rel=0.03)
    assert scale.cache_build(1e12, 64, dataclasses.replace(rates, driver_rows_bytes_per_s=1e6))[0] == "read"  # alone


def test_more_gpus_fail_more_often_and_lose_more():
    plans = [make_plan(MODELS["8b"], gpus, 1e12, Rates()) for gpus in (512, 4096)]
    assert plans[1].failures_per_day == pytest.approx(8 * plans[0].failures_per_day)
    assert plans[1].goodput_formula < plans[0].goodput_formula
    assert all(abs(plan.goodput - plan.goodput_formula) < 0.01 for plan in plans)


# --- command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"), [("1GB", 1e9), ("1.5 TB", 1.5e12), ("10g", 1e10), ("2,000MB", 2e9), ("5e9", 5e9)]
)
def test_sizes(text, size):
    assert read_bytes(text) == size


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpus", "0"], "--gpus 0"),
        (["--gpus", "many"], "many"),
        (["--gpus", "1000000"], "16,384"),
        (["--text", "lots"], "lots"),
        (["--text", "1.2.3GB"], "1.2.3GB"),
        (["--text", "5B"], "1MB"),
        (["--text", "nanGB"], "nanGB"),
        (["--model", "9t"], "124m"),
        (["--epochs", "nan"], "--epochs"),
        (["--seed", "-1"], "--seed"),
        (["--assume", "speed=3"], "--rates"),
        (["--assume", "mfu"], "mfu"),
        (["--assume", "mfu=0"], "mfu"),
        (["--assume", "jitter=inf"], "jitter"),
        (["--assume", "failures_per_gpu_day=1e6"], "failures_per_gpu_day"),
        (["--gpus", "1", "--model", "70b"], "--model"),
    ],
)
def test_bad_input_is_one_line(arguments, named, capsys):
    with pytest.raises(SystemExit) as caught:
        scale.main(arguments)
    output, errors = capsys.readouterr()
    assert caught.value.code == 2 and output == ""
    assert len(errors.splitlines()) == 1 and errors.startswith("error: ") and named in errors


def test_the_table_of_one_plan_depends_on_the_seed_alone(capsys):
    tables = []
    for seed in (0, 0, 1):
        assert scale.main(["--gpus", "4096", "--text", "1TB", "--seed", str(seed)]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]
    rows = dict([cell.strip() for cell in line.split("|")[1:3]] for line in tables[0].splitlines())
    plan = make_plan(MODELS["70b"], 4096, 1e12, Rates())
    assert rows["engine"].startswith("Levanter, 4,096 GPUs")
    assert rows["goodput, closed form"] == f"{plan.goodput_formula:.2%}"
    assert rows["goodput, simulated"].startswith(f"{plan.goodput:.2%}")


def test_the_grid_has_a_row_for_each_count_and_size(capsys):
    assert scale.main([]) == 0
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[1]) for row in rows] == list(itertools.product(["1", "8", "256", "4,096"], scale.TEXTS))
    assert all(len(row) == len(head) for row in rows)


def test_the_rates_are_listed_with_what_was_assumed(capsys):
    assert scale.main(["--rates", "--assume", "mfu=0.3"]) == 0
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in capsys.readouterr().out.splitlines()]
    listed = {name: (value, origin) for name, value, origin in rows}
    assert listed["mfu"] == ("0.3", "given with --assume")
    assert float(listed["hop_s"][0]) == Rates().hop_s and listed["hop_s"][1].startswith("assumed")
    assert listed["gather_row_s"][1].startswith("measured")


def test_as_a_module():
    """It needs numpy alone, so that a plan can be made where torch is not installed."""
    block = "import sys; sys.modules.update(torch=None, niels_gpt=None); sys.argv[1:] = ['--gpus=8', '--text=1GB']; "
    run = "import runpy; runpy.run_module('scripts.scale', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", block + run], cwd=ROOT, env=os.environ, capture_output=True)
    assert done.returncode == 0 and b"DDP, 8 GPUs" in done.stdout, done.stderr
