"""The comparison of runs."""

from niels_gpt.report.document import html_page, markdown
from niels_gpt.report.run_comparison import comparison
from niels_gpt.report.run_report import read_facts
from tests.report.pages import read
from tests.report.test_document import rows_of
from tests.report.test_run_report import record
from tests.runs.test_catalog import P_VAL, make_run


def evals(*losses):
    return [(i, {"val_roam": loss, "val_chat": loss}) for i, loss in enumerate(losses)]


def compare(**runs):
    document = comparison({name: read_facts(path) for name, path in runs.items()})
    return read(html_page(document)), markdown(document)


def test_curves_metrics_and_config(tmp_path):
    a = make_run(tmp_path / "a", P_VAL, evals=evals(3.0, 2.0))
    b = record(make_run(tmp_path / "b", P_VAL, "train.B=8", evals=evals(4.0, 1.0, 2.0)))
    page, text = compare(a=a, b=b)
    rows = {row[0]: row[1:] for row in rows_of(text)}
    assert rows["best validation loss"] == ["2.0000", "1.0000"]
    assert rows["train.B"] == ["32", "8"]
    assert "train.total_steps" not in rows
    assert rows["torch"] == ["not recorded", "2.9.0"]
    validation = next(e for e in page.all("svg") if e[0]["aria-label"].startswith("Validation loss"))
    assert validation[0]["aria-label"].endswith("a from 3 to 2; b from 4 to 2")
    assert sorted(page.texts("title"))[:2] == ["Runs a, b", "a"]


def test_losses_per_byte_and_per_token_have_separate_charts(tmp_path):
    a = make_run(tmp_path / "a", P_VAL, evals=evals(3.0))
    shares = ["train.p_train={x: 1.0}", "train.p_val={x: 1.0}"]
    b = make_run(tmp_path / "b", "task=pretrain", *shares, evals=[(0, {"val_pretrain": 5.0})])
    page, _ = compare(a=a, b=b)
    named = [e[0]["aria-label"] for e in page.all("svg") if "Validation" in e[0]["aria-label"]]
    assert [("per byte" in name, "per token" in name) for name in named] == [(True, False), (False, True)]


def test_runs_without_steps(tmp_path):
    runs = {name: make_run(tmp_path / name, steps=0) for name in ("a", "b")}
    _, text = compare(**runs)
    assert "No step is recorded yet." in text and "equal" in text


def test_more_runs_than_colors(tmp_path):
    runs = {f"r{i}": make_run(tmp_path / f"r{i}", P_VAL, evals=evals(3.0)) for i in range(10)}
    page, _ = compare(**runs)
    assert page.texts("h1") == ["10 runs"]
    assert [e for e in page.all("g") if e[0]["class"] == "c1 dash"]
