"""The generated page of results."""

import json

import pytest

from bench import history

MACHINE = {"cpu": "Abacus", "cores": 2, "python": "3.12.1", "torch": "2.11", "transformers": "5.0", "load": [0.5, 0, 0]}


def row(case, contender, median, role="peer", unit="tokens/s", **more):
    about = {"ratio": None, "target": "", "met": None, "error": None, "group": ""}
    return {"case": case, "contender": contender, "role": role, "unit": unit, "median": median, **about, **more}


def result(date, *rows, **more):
    return {"date": f"{date}T10:20:30+01:00", "device": "cpu", "quick": False, "machine": MACHINE, "rows": rows, **more}


def test_a_row_has_our_figure_the_peers_and_the_verdict():
    made = history.page(
        [
            result(
                "2030-01-02",
                row("step", "ours", 1300.0, "ours", ratio=1.3, target="≥ 1.2x", met=True, group="a"),
                row("step", "nano, a", 1000.0, group="a"),
                row("step", "Llama", 900.0, group="b"),
                row("step", "nano, a", 5.0, unit="GiB", group="a"),
                row("step", "litgpt, a", None, error="not installed", group="a"),
                row("step", "GPT-2, a", None, error="failed: OutOfMemoryError: 5 GiB: and a page more", group="a"),
                note="a quiet machine",
            )
        ]
    )
    assert "## Abacus, 2 cores" in made
    peers = "nano 1,000; litgpt not installed; GPT-2 failed: OutOfMemoryError"
    assert f"| 2030-01-02 | step | ours | 1,300 tokens/s | {peers} | 1.30 | ≥ 1.2x | met |" in made
    assert "Llama" not in made.split("## Abacus")[1].split("###")[0]
    assert "- 2030-01-02 10:20: python 3.12.1, torch 2.11, transformers 5.0, load before 0.5 (step). a quiet" in made


def test_a_case_has_its_newest_result_only():
    oldest = result("2029-01-01", row("step", "ours", 50.0, "ours"))
    older = result("2030-01-01", row("step", "ours", 100.0, "ours"), row("other", "ours", 7.0, "ours", unit="ms"))
    newer = result("2030-02-01", row("step", "ours", 200.0, "ours", met=False, target="≥ 300"))
    made = history.page([oldest, older, newer])
    assert "200 tokens/s" in made and "**missed**" in made and "7.00 ms" in made and "100 tokens/s" not in made
    assert "2030-02-01 10:20" in made and "2030-01-01 10:20" in made and "2029" not in made


def test_a_gpu_has_a_separate_section():
    gpu = result("2030-01-01", row("step", "ours", 1.0, "ours"))
    gpu["machine"] = {**MACHINE, "gpu": "Fast One", "cuda": "13.0"}
    made = history.page([gpu, result("2030-01-01", row("step", "ours", 2.0, "ours"))])
    assert "## Fast One" in made and "CUDA 13.0" in made and made.count("### Measured") == 2


def test_results_are_recorded_but_not_quick_ones(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(history, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(history, "PAGE", tmp_path / "page.md")
    path = tmp_path / "r.json"
    path.write_text(json.dumps(result("2030-01-01", row("step", "ours", 1.0, "ours"))), encoding="utf-8")
    assert history.main([str(path)]) == 0
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["2030-01-01-102030-cpu.json"]
    assert "1.00 tokens/s" in (tmp_path / "page.md").read_text(encoding="utf-8")
    path.write_text(json.dumps(result("2030-01-01", quick=True) | {"quick": True}), encoding="utf-8")
    assert history.main([str(path)]) == 2
    assert "--quick" in capsys.readouterr().err


def test_the_page_in_docs_is_generated_from_the_recorded_results():
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(history.KEPT.glob("*.json"))]
    if not results:
        pytest.skip("no recorded results")
    assert history.PAGE.read_text(encoding="utf-8") == history.page(results)
