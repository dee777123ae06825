"""Reports of runs in Chromium, from the file system: axe, light and dark, and a phone."""

import pytest

from niels_gpt.report.document import html_page
from niels_gpt.report.run_comparison import comparison
from niels_gpt.report.run_report import pipeline_report, read_facts, run_report
from tests.browser.test_page import violations
from tests.report.test_run_report import EVALS, record
from tests.runs.test_catalog import P_VAL, make_pipeline, make_run

WINDOWS = {
    "light": {"viewport": {"width": 1280, "height": 800}},
    "dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A report of a run, of a pipeline, and a comparison."""
    folder = tmp_path_factory.mktemp("reports")
    one = read_facts(record(make_run(folder / "one", P_VAL, evals=EVALS)))
    two = read_facts(make_run(folder / "two", P_VAL, "train.B=8", evals=EVALS))
    chat = make_pipeline(folder / "chat")
    documents = {
        "run": run_report(one),
        "pipeline": pipeline_report(chat, [read_facts(chat / phase) for phase in ("pretrain", "sft")]),
        "comparison": comparison({"one": one, "two": two}),
    }
    for name, document in documents.items():
        (folder / f"{name}.html").write_text(html_page(document), encoding="utf-8")
    return folder


@pytest.mark.parametrize("window", list(WINDOWS))
@pytest.mark.parametrize("kind", ["run", "pipeline", "comparison"])
def test_axe_finds_nothing_serious_and_nothing_is_loaded(browser, reports, kind, window):
    context = browser.new_context(offline=True, **WINDOWS[window])
    page = context.new_page()
    requests, problems = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda err: problems.append(str(err)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    url = (reports / f"{kind}.html").as_uri()
    page.goto(url)
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert (requests, problems) == ([url], [])
    context.close()
