"""The base of a run: how it is found, and P(z) under it beside P(z) under the tuned model."""

import csv
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from niels_gpt.cli.main import main
from niels_gpt.memorization.audit import AuditRequest, audit_notes
from niels_gpt.memorization.base_model import BaseModel, find_base, load_base, with_base
from niels_gpt.memorization.extraction import log_probabilities
from niels_gpt.memorization.measure import Document, ExtractionSettings, measure
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import load_run
from niels_gpt.runs.pipeline import PipelineFolder
from niels_gpt.tokenizer import ByteTokenizer
from niels_gpt.training.loop import train
from tests.training import small_config, write_texts

SETTINGS = ExtractionSettings(window=12, prompt=6, stride=7, greedy=0)
SURE = 1e-60
"""A threshold that every window reaches: 6 bytes of a model that knows nothing have a P(z) of about 1e-14."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "data")


def trained(texts, folder, *options):
    run = RunFolder(folder)
    train(small_config(texts, "train.total_steps=2", "train.warmup_steps=1", *options), run)
    return run


@pytest.fixture(scope="module")
def base(texts, tmp_path_factory):
    return trained(texts, tmp_path_factory.mktemp("runs") / "base")


@pytest.fixture(scope="module")
def tuned(texts, base, tmp_path_factory):
    return trained(texts, tmp_path_factory.mktemp("runs") / "tuned", f"init_from={base.best}", "train.seed=9")


def base_of(run):
    return find_base(load_run(run.path, device="cpu"))


def test_a_run_from_random_weights_has_no_base(base):
    assert base_of(base) == (None, "")
    assert load_base(load_run(base.path, device="cpu")) == (None, "")


def test_the_oldest_run_is_the_base(texts, base, tuned, tmp_path):
    assert base_of(tuned) == (str(base.best), "")
    again = trained(texts, tmp_path / "again", f"init_from={tuned.best}")
    assert base_of(again) == (str(base.best), "")


def test_the_first_phase_of_a_pipeline_is_no_base(texts, base, tmp_path):
    config = small_config(texts)
    for name, start in (("none", []), ("some", [f"init_from={base.best}"])):
        folder = PipelineFolder(tmp_path / name)
        first = trained(texts, folder.runs["pretrain"].path, *start)
        second = trained(texts, folder.runs["sft"].path, f"init_from={first.best}")
        folder.write_configs({"pretrain": config, "sft": config})
        assert base_of(second) == ((str(base.best), "") if start else (None, ""))


def test_a_base_that_is_gone(texts, base, tmp_path):
    moved = RunFolder(shutil.copytree(base.path, tmp_path / "base"))
    full = trained(texts, tmp_path / "full", f"init_from={moved.best}")
    lora = trained(texts, tmp_path / "lora", f"init_from={moved.best}", "train.lora.rank=2")
    shutil.rmtree(moved.path)
    path, problem = base_of(full)
    assert path is None
    assert str(moved.best) in problem
    assert base_of(lora) == (str(lora.base), "")
    verdict = audit_notes(load_run(full.path, device="cpu"), AuditRequest(SETTINGS)).verdict
    assert (verdict.base, verdict.base_problem) == ("", problem)


def test_values_are_those_of_the_base(base, tuned):
    ids = np.frombuffer(b"the model reads a note, and so it learns" * 2, dtype=np.uint8).astype(np.int64)
    loaded, other = (load_run(run.path, device="cpu") for run in (tuned, base))
    (measured,) = measure(loaded.model, [Document("a", ids)], ByteTokenizer(), SETTINGS)
    found = BaseModel(other.model, str(other.path))
    (both,) = with_base([measured], found, tokenizer=ByteTokenizer())
    expected = log_probabilities(other.model, ids, measured.starts, window=12, prompt=6)
    np.testing.assert_allclose(both.base_log_p, expected, rtol=1e-6)
    assert not np.allclose(both.base_log_p, both.log_p)
    least = float(np.median(measured.log_p))
    (some,) = with_base([measured], found, least=least)
    assert (np.isnan(some.base_log_p) == (measured.log_p < least)).all()
    np.testing.assert_allclose(some.base_log_p[measured.log_p >= least], expected[measured.log_p >= least], rtol=1e-6)


@pytest.mark.parametrize("exact", [True, False])
def test_passages_that_the_base_knows_are_counted(texts, base, tuned, exact, tmp_path):
    loaded = load_run(tuned.path, device="cpu")
    request = AuditRequest(SETTINGS, threshold=SURE, exact=exact)
    result = audit_notes(loaded, request).verdict
    assert result.base == str(base.best)
    assert result.windows_over == result.windows_known > 0
    assert all("base_log_p" in passage for passage in result.passages)
    assert all(row["known"] == row["over"] for row in result.documents)
    # A base that is certain of other text knows none of it.
    moved = RunFolder(shutil.copytree(base.path, tmp_path / "base"))
    saved = torch.load(moved.best, weights_only=True)
    saved["model"]["norm.weight"] *= 1e4
    torch.save(saved, moved.best)
    run = RunFolder(shutil.copytree(tuned.path, tmp_path / "tuned"))
    run.write_config(dataclasses.replace(run.read_config(), init_from=str(moved.best)))
    result = audit_notes(load_run(run.path, device="cpu"), request).verdict
    assert result.windows_over > 0
    assert result.windows_known == 0
    assert result.verdict == "NOT SAFE"


def test_reports_have_both(base, tuned, tmp_path, capsys):
    options = ["--window", "12", "--prompt", "6", "--device", "cpu", "--out"]
    with pytest.raises(SystemExit) as end:
        main(["memorize", str(tuned.path), "--no-curve", "--greedy", "2", *options, str(tmp_path / "memorize")])
    assert not end.value.code
    printed = capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["audit", str(tuned.path), "--threshold", str(SURE), *options, str(tmp_path / "audit")])
    assert end.value.code == 3
    audited = capsys.readouterr().out
    assert str(base.best) in printed and str(base.best) in audited
    assert "already known to the base" in audited
    for folder in ("memorize", "audit"):
        report = json.loads((tmp_path / folder / "report.json").read_text(encoding="utf-8"))
        assert report["base"] == str(base.best)
        assert all(d["base"]["bits_per_byte"] > 0 for d in report["documents"])
        assert all("base_p" in passage for passage in report["passages"])
        assert "P(z) of the base" in (tmp_path / folder / "report.html").read_text(encoding="utf-8")
        rows = list(csv.DictReader((tmp_path / folder / "windows.csv").open(encoding="utf-8")))
        assert all(float(row["base_log_p"]) < 0 for row in rows)
