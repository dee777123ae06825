"""The benchmark harness: its ratios, table, JSON and processes. Speed itself is not tested."""

import io
import json

import pytest
import torch
from rich.console import Console

from bench.__main__ import main
from bench.case import NAMES, ON_CPU, ON_CUDA, Case, Contender, Work, load_case
from bench.cases.get_batch import literal
from bench.report import table
from bench.runner import Row, summarize
from niels_gpt import get_batch


def contender(name, role="peer", **options):
    return Contender(name, lambda quick: Work(lambda: None), role=role, **options)


def measured(seconds, amount=1.0, gflop=None):
    return {"amount": amount, "gflop": gflop, "facts": {}, "seconds": seconds}


def test_the_ratio_is_the_median_of_the_per_round_ratios_to_the_fastest_peer():
    case = Case("c", "ms", (contender("ours", "ours", target=2.5), contender("slow"), contender("fast")))
    rows = summarize(case, {"ours": measured([1, 2, 10]), "slow": measured([9, 9, 99]), "fast": measured([4, 4, 30])})
    ours, slow, fast = rows
    assert (ours.median, ours.versus, ours.ratio) == (2000, "fast", 3)  # the median of 4, 2, 3
    assert (ours.target, ours.met) == ("≥ 2.5x", True)
    assert slow.ratio == pytest.approx(4 / 9)
    assert fast.ratio == 1
    assert ours.seconds == [1, 2, 10]


def test_ratios_stay_within_a_group():
    case = Case("c", "ms", (contender("a", "ours", group="1"), contender("b", group="2"), contender("c", "ours")))
    rows = summarize(case, {name: measured([1.0]) for name in "abc"})
    assert [row.versus for row in rows] == [None, "b", None]


def test_rates_count_the_amount_of_work():
    case = Case("c", "tokens/s", (contender("ours", "ours"), contender("peer")))
    ours, _ = summarize(case, {"ours": measured([2, 4], amount=80), "peer": measured([1, 1], amount=10)})
    assert ours.median == 30  # the median of 40 and 20
    assert ours.ratio == pytest.approx((4 + 2) / 2)


def test_a_baseline_is_subtracted_round_by_round_and_a_limit_is_judged():
    case = Case("c", "ms", (contender("bare", "baseline"), contender("all", "ours", minus="bare", target=50)))
    seconds = {"bare": measured([0.1, 0.2, 0.1], amount=2), "all": measured([0.3, 0.3, 0.4], amount=2)}
    _, row = summarize(case, seconds)
    assert row.median == pytest.approx(100)  # half of 0.2, 0.1, 0.3 s
    assert (row.target, row.met) == ("≤ 50 ms", False)


def test_the_peak_is_the_best_round_and_ours_is_a_share_of_it():
    case = Case("c", "tokens/s", (contender("ours", "ours"), contender("peak", "peak")))
    _, share, peak = summarize(case, {"ours": measured([1, 2, 4], gflop=8), "peak": measured([2, 1], gflop=10)})
    assert (peak.median, peak.unit) == (10, "GFLOP/s")
    assert (share.contender, share.median, share.unit) == ("ours", 40, "% of peak")


def test_without_peers_the_target_stays_open():
    case = Case("c", "ms", (contender("ours", "ours", target=3), contender("peer")))
    ours, peer = summarize(case, {"ours": measured([1.0]), "peer": {"error": "not installed", "seconds": []}})
    assert (ours.ratio, ours.target, ours.met) == (None, "≥ 3x", None)
    assert (peer.error, peer.median) == ("not installed", None)


def test_measurements_are_compared_by_their_unit():
    """Less memory and more MFU are better; a share that may be 0 has no ratio."""
    goals = {"GiB": "≥ 2x", "% MFU": "≥ 55", "% stall": "≤ 1"}
    case = Case("c", "tokens/s", (contender("ours", "ours", goals=goals), contender("a"), contender("b")))
    also = {"GiB": [2.0, 2.0], "% MFU": [50.0, 52.0], "% stall": [0.0, 0.4]}
    rows = summarize(
        case,
        {
            "ours": measured([1, 1], amount=10) | {"also": also},
            "a": measured([2, 2], amount=10) | {"also": {"GiB": [5.0, 7.0], "% MFU": [40.0, 40.0]}},
            "b": measured([3, 3], amount=10) | {"also": {"GiB": [4.0, 5.0]}},
        },
    )
    found = {(row.contender, row.unit): row for row in rows}
    assert (found["ours", "tokens/s"].median, found["ours", "tokens/s"].ratio) == (10, 2)
    memory, mfu, stall = (found["ours", unit] for unit in ("GiB", "% MFU", "% stall"))
    assert (memory.median, memory.versus, memory.ratio, memory.met) == (2.0, "b", 2.25, True)
    assert (mfu.versus, mfu.target, mfu.met) == ("a", "≥ 55", False)
    assert mfu.ratio == pytest.approx(51 / 40)
    assert (stall.median, stall.ratio, stall.met) == (0.2, None, True)
    assert memory.values == [2.0, 2.0] and memory.seconds == []
    assert found["b", "GiB"].ratio == 1


def test_a_case_can_have_a_unit_that_its_rounds_measure():
    case = Case("c", "GiB", (contender("ours", "ours", target=2), contender("peer")))
    ours, peer = summarize(
        case, {"ours": measured([9]) | {"also": {"GiB": [3.0]}}, "peer": measured([1]) | {"also": {"GiB": [9.0]}}}
    )
    assert (ours.median, ours.ratio, ours.target, ours.met, ours.seconds) == (3.0, 3.0, "≥ 2x", True, [])
    assert peer.median == 9.0


def test_a_batch_is_compared_with_batch_1():
    many = contender("many", "ours", group="32", alone="one", goals={"x alone": "≥ 15"})
    case = Case("c", "tokens/s", (contender("one", "ours", group="1"), many))
    *_, row = summarize(case, {"one": measured([1, 1], amount=10), "many": measured([2, 4], amount=320)})
    assert (row.contender, row.unit, row.median, row.met) == ("many", "x alone", 12, False)  # the median of 16 and 8


def test_the_table_has_a_line_per_row_within_80_columns():
    rows = [
        Row("train_step", "niels-gpt, dropout 0.1", "ours", "tokens/s", 12345.6, 1.234, "x", "≥ 1.2x", False),
        Row("generate", "litgpt", "peer", "tokens/s", error="not installed"),
        Row("serve", "x", "peer", "tokens/s", error="not here: y[z]"),
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(table(rows))
    lines = console.file.getvalue().splitlines()
    (first,) = [line for line in lines if "niels-gpt" in line]
    assert all(part in first for part in ("train_step", "12,346", "tokens/s", "1.23x", "≥ 1.2x missed"))
    assert any("litgpt" in line and "not installed" in line for line in lines)
    assert any("y[z]" in line for line in lines)  # brackets are no markup


def test_contenders_run_in_separate_processes(tmp_path, capsys):
    code = main(["tests.bench.fake", "--rounds", "3", "--quick", "--json", str(tmp_path / "new/r.json")])
    assert code == 1  # because of the broken ones
    result = json.loads((tmp_path / "new/r.json").read_text(encoding="utf-8"))
    assert result["machine"]["cpu"] and result["machine"]["cores"] and result["machine"]["torch"]
    rows = {row["contender"]: row for row in result["rows"]}
    assert len(rows["ours"]["seconds"]) == len(rows["peer"]["seconds"]) == 3
    assert rows["ours"]["versus"] == "peer"
    assert rows["ours"]["facts"] == {"quick": True}
    assert rows["broken"]["error"] == "failed: RuntimeError: no such luck"
    assert rows["absent"]["error"] == "not installed"
    assert rows["unavailable"]["error"] == "not here: no such processor"
    assert rows["dying"]["error"] == "failed: exit code 3"
    assert "not installed" in capsys.readouterr().out


def test_fresh_contenders_are_new_processes_in_every_round(tmp_path):
    assert main(["tests.bench.fresh", "--json", str(tmp_path / "r.json")]) == 0
    rows = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))["rows"]
    found = {(row["contender"], row["unit"]): row for row in rows}
    assert found["ours", "s"]["values"] == [1, 1, 1] and found["ours", "s"]["met"] is True
    processes = [process for name in ("ours", "peer") for process in found[name, "process"]["values"]]
    assert len(set(processes)) == 6


def test_a_missing_device_is_reported_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["train_step", "--device", "cuda"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "cuda" in err and "cpu" in err
    with pytest.raises(ValueError, match=r"get_batch.* cuda.*train_step,"):
        load_case("get_batch", "cuda")


def test_every_case_loads_and_an_unknown_one_is_refused(capsys):
    assert set(ON_CPU) <= set(NAMES) and set(ON_CUDA) <= set(NAMES)
    for name, device in [*((name, "cpu") for name in NAMES), *((name, "cuda") for name in ON_CUDA)]:
        case = load_case(name, device)
        names = [c.name for c in case.contenders]
        assert (case.name, case.device) == (name, device) and len(set(names)) == len(names)
        assert all(c.alone in (None, *names) for c in case.contenders)
    with pytest.raises(SystemExit, match="2"):
        main(["trian_step"])
    errors = capsys.readouterr().err
    assert "'trian_step'" in errors and "get_batch" in errors


def test_the_literal_batch_is_the_batch():
    options = {"p": {"a": 0.7, "b": 0.3}, "B": 8, "T": 16, "device": "cpu"}
    sources = {"a": bytes(range(256)), "b": bytes(range(255, -1, -1))}
    ours = get_batch(sources, **options, generator=torch.Generator().manual_seed(1))
    theirs = literal(sources, **options, generator=torch.Generator().manual_seed(1))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
