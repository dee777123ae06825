"""The view Runs in a real Chromium: the list, curves that grow while a run trains, samples, strips and batch rows."""

import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from playwright.sync_api import expect

from niels_gpt.config.yaml_file import dump_config
from niels_gpt.report import curves
from niels_gpt.runs.metrics import encode_line, read_metrics
from niels_gpt.serve.page_routes import PAGE_ROUTERS, STATIC
from niels_gpt.serve.runs_routes import runs_router
from niels_gpt.training.loop import train
from tests.browser.conftest import Opened
from tests.browser.test_page import PHONE, violations
from tests.inference.models import spread_model
from tests.report.test_memorization_page import NASTY, TEXT, make_report
from tests.runs.test_catalog import make_run
from tests.serve.conftest import running, served
from tests.training import small_config, write_texts

LONG_STEPS = 20_000
EVALS = ("val_notes", "val_wiki", "val_books")


def write_long_run(path):
    """A run of many steps over three sources, whose losses are a function of the step."""
    make_run(path, f"train.total_steps={LONG_STEPS}", steps=0)
    with (path / "metrics.jsonl").open("wb") as file:
        for step in range(LONG_STEPS):
            loss = 2.0 + 6.0 * math.exp(-step / 800) + 0.3 * math.sin(step * 1.7)
            line = {"step": step, "loss": loss, "lr": 3e-4 * (1 - step / LONG_STEPS), "tokens_per_s": 40_000.0}
            if step % 1000 == 999:
                line["evals"] = {name: 2.2 + i / 5 + 6.0 * math.exp(-step / 800) for i, name in enumerate(EVALS)}
            file.write(encode_line(line))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with texts and runs: a trained one with samples and a report, a long, a damaged and a nasty one."""
    folder = tmp_path_factory.mktemp("runs-view")
    texts = write_texts(folder / "texts")
    runs = folder / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "plot_losses", lambda run: None)
        train(small_config(texts, "output.sample_every=4"), runs / "small", device="cpu")
    report = {**make_report(), "checkpoint": "runs/small/checkpoints/best.pt"}
    (runs / "small" / "memorization").mkdir()
    (runs / "small" / "memorization" / "report.json").write_text(json.dumps(report), encoding="utf-8")
    (runs / "small" / "samples" / "step_00000008.txt").write_text(NASTY, encoding="utf-8")
    write_long_run(runs / "study" / "long run")
    make_run(runs / "damaged")
    (runs / "damaged" / "config.yaml").write_text("{{", encoding="utf-8")
    make_run(runs / "<img src=x onerror=document.title='ran'>")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    routers = [*PAGE_ROUTERS, runs_router(folder / "runs")]
    with running([served("m", spread_model(T=64))], routers=routers, static=STATIC) as found:
        yield found


def open_run(it, name):
    page = it.open("runs")
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    expect(page.locator(".plot svg path.stroke").first).to_be_attached()
    return page


def chart(page, title):
    return page.locator("figure.chart").filter(has=page.get_by_role("heading", name=title, exact=True))


def line(page, key="train", title="Loss"):
    """The points of a line in pixels."""
    path = chart(page, title).locator(f"path[data-line='{key}']").get_attribute("d")
    return [tuple(map(float, pair.split(" "))) for pair in re.split("[ML]", path) if pair]


def table(page, title):
    """The table of a chart: {step: {column: text}}."""
    figure = chart(page, title)
    if figure.locator("details").get_attribute("open") is None:
        figure.get_by_text("Show as a table").click()
    expect(figure.locator("tbody tr").first).to_be_attached()  # it is drawn after the click
    head, *rows = figure.locator("table").evaluate(
        "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    names, cells = head[1:], [(row[0], row[1:]) for row in rows]
    return {int(step.replace(",", "")): dict(zip(names, values, strict=True)) for step, values in cells}


DESKTOP = {"viewport": {"width": 1280, "height": 850}}
SMALL_PHONE = {**PHONE, "viewport": {"width": 375, "height": 700}}


@pytest.mark.parametrize("device", [DESKTOP, SMALL_PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("view", ["chat", "compare", "runs", "runs/small", "runs/study%2Flong%20run"])
def test_no_view_scrolls_past_its_content(opened, view, device):
    page = opened(**device).open(view)
    expect(page.locator("h1")).to_be_attached()
    if "/" in view:
        expect(page.locator(".plot svg path.stroke").first).to_be_attached()
        table(page, "Loss")  # its caption is hidden in a scroller
    bottom, height, inner = page.evaluate(
        """() => [
          document.getElementById("view").getBoundingClientRect().bottom + scrollY,
          document.documentElement.scrollHeight,
          innerHeight,
        ]"""
    )
    assert height <= max(bottom, inner) + 1
    assert view != "chat" or height <= inner


def test_a_run_scrolls_with_the_wheel_beside_it_and_with_the_keys(opened):
    page = opened(viewport={"width": 1920, "height": 900}).open("runs/small")
    expect(page.locator(".plot svg path.stroke").first).to_be_attached()
    assert page.locator("main").bounding_box()["x"] > 200
    page.mouse.move(100, 600)
    page.mouse.wheel(0, 500)
    page.wait_for_function("() => scrollY > 100")
    expect(page.get_by_role("link", name="Chat")).to_be_in_viewport()
    page.reload()
    expect(page.locator(".plot svg path.stroke").first).to_be_attached()
    page.evaluate("scrollTo(0, 0)")
    page.keyboard.press("PageDown")
    page.wait_for_function("() => scrollY > 100")
    settings = page.get_by_text("settings differ from the defaults")
    expect(settings).to_be_attached()  # it is loaded last
    for _ in range(100):  # the page may still grow, or scroll from the key before
        page.keyboard.press("End")
        if settings.evaluate("e => e.getBoundingClientRect().bottom <= innerHeight"):
            break
        page.wait_for_timeout(100)
    expect(settings).to_be_in_viewport()
    page.get_by_role("link", name="← All runs").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1, name="Runs")).to_be_in_viewport()
    assert page.evaluate("scrollY") == 0


def test_list(opened):
    it = opened()
    page = it.open("runs")
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(4)
    states = {row.locator("a").text_content(): row.locator(".state").text_content() for row in rows.all()}
    assert {name: state.split()[-1] for name, state in states.items()} == {
        "small": "finished",
        "study/long run": "finished",
        "damaged": "failed",
        "<img src=x onerror=document.title='ran'>": "stopped",
    }
    expect(rows.filter(has_text="damaged").locator(".problem")).to_contain_text("YAML")
    it.picture("runs-list")
    assert page.title() != "ran" and page.locator("main img").count() == 0


def test_curves_are_those_of_the_metrics(opened, folder):
    it = opened()
    page = open_run(it, "study/long run")
    shown = table(page, "Loss")
    lines = {m["step"]: m for m in read_metrics(folder / "runs/study/long run/metrics.jsonl").lines}
    known = [step for step in shown if "evals" in lines[step]]
    assert len(known) == 20 and 1 + len(EVALS) == len(next(iter(shown.values())))
    for step in known:
        for name in EVALS:
            assert float(shown[step][name]) == pytest.approx(lines[step]["evals"][name], rel=2e-3)
    rates = table(page, "Learning rate")
    assert float(rates[LONG_STEPS - 1]["learning rate"].replace("\N{MINUS SIGN}", "-")) == pytest.approx(
        lines[LONG_STEPS - 1]["lr"], abs=1e-7
    )
    points = line(page)
    assert 500 < len(points) <= 1500  # averaged, not all steps
    assert points[0][0] < points[-1][0] and points[0][1] < points[-1][1]  # the loss falls, pixels count downwards
    it.picture("runs-curves")


def test_log_and_linear_axis(opened):
    it = opened()
    page = open_run(it, "study/long run")
    page.get_by_label("Cut off the first fall").uncheck()

    def bend(points):
        """Where a third of the fall lies, as a fraction of the height: lower on a logarithmic axis."""
        top, bottom = points[0][1], max(y for _, y in points)
        return (points[100][1] - top) / (bottom - top)

    page.get_by_label("Smoothing").fill("0")
    linear = bend(line(page))
    labels = chart(page, "Loss").locator(".grid text").all_text_contents()
    page.get_by_label("Loss axis").select_option("log")
    logarithmic = bend(line(page))
    assert logarithmic < linear - 0.05
    assert chart(page, "Loss").locator(".grid text").all_text_contents() != labels
    it.picture("runs-log")
    page.get_by_label("Loss axis").select_option("linear")
    assert bend(line(page)) == pytest.approx(linear)


def test_cutting_off_the_first_fall_uses_the_height(opened):
    page = open_run(opened(), "study/long run")
    late = [y for x, y in line(page) if x > 700]
    page.get_by_label("Cut off the first fall").uncheck()
    whole = [y for x, y in line(page) if x > 700]
    assert max(late) - min(late) > 1.5 * (max(whole) - min(whole))


def test_smoothing(opened):
    it = opened()
    page = open_run(it, "study/long run")

    def roughness(points):
        ys = [y for _, y in points[200:]]
        return sum(abs(b - a) for a, b in itertools.pairwise(ys))

    slider = page.get_by_label("Smoothing")
    found = []
    for value in ("0", "0.6", "0.95"):
        slider.fill(value)
        found.append(roughness(line(page)))
    assert found[0] > 2 * found[1] > 4 * found[2]
    assert chart(page, "Loss").locator("path.faint").count() == 1
    slider.focus()
    page.keyboard.press("Home")
    expect(page.locator("output").first).to_have_text("0.00")
    assert roughness(line(page)) == pytest.approx(found[0])
    assert chart(page, "Loss").locator("path.faint").count() == 0


def test_smoothing_is_the_mean_with_exponential_weights(opened):
    page = opened().open("runs")
    values = [3.0, None, 1.0, 2.0, 10.0]
    found = page.evaluate("async (v) => (await import('/static/charts.js')).smooth(v, 0.5)", values)
    known = [v for v in values if v is not None]
    means = [
        sum(v * 0.5 ** (end - i) for i, v in enumerate(known[: end + 1])) / sum(0.5**k for k in range(end + 1))
        for end in range(len(known))
    ]
    assert [v for v in found if v is not None] == pytest.approx(means) and found[1] is None


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.16, 5.3), (0, 41236), (-3, -1), (1e-5, 3e-4), (5, 5.001)])
def test_ticks_are_round_and_inside(opened, low, high):
    page = opened().open("runs")
    found = page.evaluate("async ([a, b]) => (await import('/static/charts.js')).ticks(a, b, 5)", [low, high])
    gap = (high - low) * 1e-6
    assert 3 <= len(found) <= 7 and all(low - gap <= tick <= high + gap for tick in found)
    step = found[1] - found[0]
    assert float(f"{step / 10 ** math.floor(math.log10(step) + 1e-9):.6g}") in (1, 2, 2.5, 5)


def test_sources_can_be_hidden(opened):
    page = open_run(opened(), "study/long run")
    key = page.get_by_role("button", name="val_wiki")
    expect(key).to_have_attribute("aria-pressed", "true")
    key.click()
    expect(chart(page, "Loss").locator("path[data-line='val_wiki']")).to_have_count(0)
    expect(chart(page, "Loss").locator("path[data-line='val_books']")).to_have_count(1)
    key.click()
    expect(chart(page, "Loss").locator("path[data-line='val_wiki']")).to_have_count(1)


def test_the_cursor_moves_with_keys_and_pointer_and_leads_to_the_batch(opened, folder):
    page = open_run(opened(), "small")
    plot = chart(page, "Loss").get_by_role("slider")
    plot.focus()
    page.keyboard.press("Home")
    expect(plot).to_have_attribute("aria-valuenow", "0")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(plot).to_have_attribute("aria-valuenow", "3")
    expect(plot).to_have_attribute("aria-valuetext", re.compile("^Step 3: training, smoothed [0-9.]+"))
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 100)
    expect(plot).to_have_attribute("aria-valuenow", "11")
    page.mouse.move(box["x"] + box["width"] - 20, box["y"] - 200)
    plot.focus()
    page.keyboard.press("End")
    page.get_by_role("button", name="Rows of this step").click()
    expect(page.get_by_text("Step 11 of 12: 4 of 4 rows")).to_be_visible()


def test_samples_over_time(opened, folder):
    it = opened()
    page = open_run(it, "small")
    text = page.get_by_role("region", name="Text of the sample")
    last = (folder / "runs/small/samples/step_00000012.txt").read_text(encoding="utf-8")
    expect(page.get_by_text("after 12 steps, 3 of 3")).to_be_visible()
    expect(text).not_to_be_empty()
    assert text.text_content() == last
    page.get_by_role("button", name="Earlier", exact=True).first.click()
    expect(page.get_by_text("after 8 steps, 2 of 3")).to_be_visible()
    expect(text).to_have_text(NASTY)
    assert page.title() != "ran"


def test_strips(opened):
    it = opened()
    page = open_run(it, "small")
    strips = page.locator("details.strip")
    expect(strips).to_have_count(4)
    strips.nth(1).locator("summary").click()
    spans = strips.nth(1).locator(".strip-text > *")
    expect(spans.first).to_be_attached()
    assert "".join(spans.all_text_contents()) == TEXT
    levels = [int(name[1:]) for name in spans.evaluate_all("(all) => all.map((one) => one.className)")]
    assert set(levels) == {0, 3, 4, 5}  # p is 0, 1/8, ..., 1
    names = spans.evaluate_all("(all) => all.map((one) => one.localName)")
    assert [name == "mark" for name in names] == [level >= 4 for level in levels]
    strips.nth(1).scroll_into_view_if_needed()
    it.picture("runs-strips")
    page.get_by_text("4 documents as a table").click()
    expect(page.get_by_role("region", name="Documents").locator("tbody tr")).to_have_count(4)


def test_batch_rows(opened, folder):
    it = opened()
    page = open_run(it, "small")
    page.get_by_label("Training step, from 0").fill("5")
    page.keyboard.press("Enter")
    rows = page.locator(".batch-row")
    expect(rows).to_have_count(4)
    from niels_gpt.training.tasks.registry import open_task

    origins = open_task(small_config(folder / "texts")).origins(5)
    for shown, row in zip(rows.all(), origins, strict=True):
        assert shown.locator("pre").text_content() == row.text and row.source in shown.locator("h3").text_content()
    page.locator("form").get_by_role("button", name="Later").click()
    expect(page.get_by_text("Step 6 of 12")).to_be_visible()
    it.picture("runs-batch")


def test_a_run_whose_data_is_gone_says_so(opened):
    it = opened()
    page = open_run(it, "study/long run")
    page.get_by_role("button", name="Show rows").click()
    expect(page.locator(".batch-row").or_(page.get_by_text("cannot").first).first).to_be_visible(timeout=60_000)
    it.problems[:] = [problem for problem in it.problems if "409" not in problem]


def start_training(folder, name):
    config = small_config(
        folder / "texts", "train.total_steps=1000000", "output.eval_every=50", "output.sample_every=200"
    )
    (folder / f"{name}.yaml").write_text(dump_config(config), encoding="utf-8")
    command = [sys.executable, "-m", "niels_gpt", "train", "--config", folder / f"{name}.yaml"]
    command += ["--run-dir", folder / "runs" / name, "--device", "cpu", "--threads", "1", "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_until(page, condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        page.wait_for_timeout(50)


def last_step(page):
    text = chart(page, "Loss").locator(".readout").text_content()
    found = re.match(r"Step ([\d,]+):", text)
    return int(found[1].replace(",", "")) if found else -1


def test_curves_grow_while_a_run_trains(opened, folder):
    """A real training run in another process: the page shows new steps, asks for new points only, and sees the end."""
    it = opened()
    answers = []
    it.page.on("response", lambda response: answers.append(response) if "/metrics?" in response.url else None)
    process = start_training(folder, "live")
    try:
        page = it.open("runs")
        row = page.locator("table.runs tbody tr").filter(has=page.get_by_role("link", name="live", exact=True))
        expect(row.locator(".state")).to_contain_text("training", timeout=60_000)
        row.get_by_role("link").click()
        expect(page.get_by_role("status").filter(has_text="training")).to_be_visible()
        seen = []
        for _ in range(3):
            before = seen[-1] if seen else -1
            wait_until(page, lambda before=before: last_step(page) > before or process.poll() is not None)
            assert process.poll() is None, process.stderr.read()
            seen.append(last_step(page))
        assert len(line(page)) > 10
        expect(chart(page, "Loss").locator("path[data-line='val_roam']")).to_be_attached(timeout=30_000)
        expect(page.get_by_role("region", name="Text of the sample")).not_to_be_empty(timeout=30_000)
        it.picture("runs-live")
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
    expect(page.get_by_role("status").filter(has_text="stopped")).to_be_visible(timeout=30_000)
    lines = read_metrics(folder / "runs/live/metrics.jsonl").lines
    wait_until(page, lambda: last_step(page) == lines[-1]["step"])
    page.get_by_label("Smoothing").fill("0")
    shown = table(page, "Loss")
    assert float(shown[lines[-1]["step"]]["training"]) == pytest.approx(lines[-1]["loss"], rel=2e-2)
    received = [response.json() for response in answers]
    assert received[0]["from"] == 0
    assert any(answer["from"] > 0 for answer in received[1:])  # unless the width has just doubled
    for answer in received[1:]:
        if answer["from"] > 0:
            assert len(answer["points"]["step"]) < len(received[0]["points"]["step"]) + 1500
    shutil.rmtree(folder / "runs/live")


def test_polling_stops_in_a_hidden_tab_and_when_the_view_is_left(opened):
    it = opened()
    page = open_run(it, "small")
    asked = lambda: sum("/metrics?" in url for url in it.requests)  # noqa: E731
    wait_until(page, lambda: asked() >= 2)
    page.evaluate(
        "() => { Object.defineProperty(document, 'hidden', { configurable: true, get: () => true });"
        "document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.wait_for_timeout(300)
    before = asked()
    page.wait_for_timeout(5000)
    assert asked() == before
    page.evaluate("() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); }")
    wait_until(page, lambda: asked() > before)
    assert asked() == before + 1
    page.get_by_role("link", name="Chat").click()
    page.wait_for_timeout(300)
    before = len([url for url in it.requests if "/api/runs" in url])
    page.wait_for_timeout(5000)
    assert len([url for url in it.requests if "/api/runs" in url]) == before


def test_polling_slows_down_when_nothing_changes(opened):
    it = opened()
    page = open_run(it, "small")
    asked = lambda: sum("/metrics?" in url for url in it.requests)  # noqa: E731
    start, began = asked(), time.monotonic()
    page.wait_for_timeout(13_000)  # after 2 + 4 + 8 s there are 2 or 3 more
    wait_until(page, lambda: asked() > start)
    more = asked() - start
    assert 2 ** (more + 1) - 2 <= time.monotonic() - began + 2  # 2 + 4 + 8 + ... s


def test_a_server_that_is_away_and_comes_back(opened, server):
    it = opened()
    page = open_run(it, "small")
    it.context.route("**/api/runs/**", lambda route: route.abort())
    expect(page.locator("#notice")).to_contain_text("does not answer", timeout=20_000)
    it.context.unroute("**/api/runs/**")
    expect(page.locator("#notice")).to_be_empty(timeout=40_000)
    it.problems[:] = [problem for problem in it.problems if "ERR_FAILED" not in problem]


def test_an_unknown_run(opened):
    page = opened().open("runs/nothing")
    expect(page.get_by_text("There is no run nothing")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened, scheme):
    it = opened(color_scheme=scheme)
    page = it.open("runs")
    expect(page.locator("table.runs tbody tr").first).to_be_visible()
    assert violations(page) == []
    open_run(it, "small")
    table(page, "Loss")
    page.locator("details.strip summary").nth(1).click()
    page.get_by_text("settings differ").click()
    page.get_by_role("button", name="Show rows").click()
    expect(page.locator(".batch-row").first).to_be_visible()
    assert violations(page) == []
    it.picture(f"runs-{scheme}")


def test_phone(opened):
    it = opened(**PHONE)
    page = it.open("runs")
    expect(page.locator("table.runs tbody tr").first).to_be_visible()
    it.picture("runs-list-phone")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(page) == []
    open_run(it, "study/long run")
    it.picture("runs-phone")
    main = page.evaluate(
        "(() => { const m = document.querySelector('main'); return [m.scrollWidth, m.clientWidth]; })()"
    )
    assert main[0] <= main[1] and violations(page) == []
    for title in ("Loss", "Learning rate", "Speed"):
        box = chart(page, title).locator("svg").last.bounding_box()
        assert 250 < box["width"] <= 390
    chart(page, "Loss").locator(".plot").tap(position={"x": 150, "y": 100})
    expect(page.get_by_role("button", name="Rows of this step")).to_be_visible()


def test_a_chart_follows_the_width_of_the_window(opened):
    page = open_run(opened(), "study/long run")
    wide = line(page)[-1][0]
    page.set_viewport_size({"width": 600, "height": 800})
    wait_until(page, lambda: line(page)[-1][0] < wide - 200)


def test_the_files_of_the_page_are_small(opened, server):
    with server.http() as http:
        names = [path.name for path in STATIC.iterdir()]
        assert sum(len(http.get(f"/static/{name}").content) for name in names) < 200_000


def test_with_an_api_key(browser, folder):
    models, routers = [served("m", spread_model(T=64))], [*PAGE_ROUTERS, runs_router(folder / "runs")]
    with running(models, routers=routers, static=STATIC, api_key="secret") as found:
        it = Opened(browser, found)
        page = it.open("runs")
        page.get_by_role("textbox", name="API key").fill("secret")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("table.runs tbody tr").first).to_be_visible()
        it.context.close()
