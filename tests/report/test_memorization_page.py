"""The memorization page: what it says of a report, read back from the HTML."""

import copy
import json
import math

import pytest

from niels_gpt.report import memorization_report as page_module
from niels_gpt.report.memorization_report import memorization_page
from tests.report.pages import read

NASTY = "<script>alert('x')</script> & \"q\" </div><!-- https://example.org/?a=1&b=2 -->"
TEXT = f"\n  {NASTY}\n\tnaïve 日本語 🙂👩‍👩‍👧 ]]> &amp; &#65;\r\nlast line  "


def document(name, *, control=False, windows=100, memorized=0, max_p=0.75, mean_log_p=-20.0, **other):
    counts = (windows // 2, memorized + 3, memorized + 2, memorized, memorized // 2)
    samples = {str(10**k): {p: min(windows, k * 7 + i) for i, p in enumerate(("0.9", "0.5", "0.1"))} for k in range(7)}
    return {
        "name": name, "source": "notes", "control": control, "tokens": 5 * windows, "bytes": 20 * windows,
        "windows": windows, "short": False, "mean_p": max_p / 8, "median_p": max_p / 64, "max_p": max_p,
        "mean_log_p": mean_log_p, "nats_per_token": 1.2345, "bits_per_byte": 0.4567, "discoverable": samples,
        "over": {p: 0 if control else n for p, n in zip(("0.0001", "0.01", "0.1", "0.5", "0.9"), counts, strict=True)},
        "greedy": {"starts": 77, "share": 0.625, "exact": 12},
        "longest_run": {"tokens": 345, "start": 3, "text": f"run of {name}"},
    } | other  # fmt: skip


def passage(rank, d):
    return {
        "document": d["name"], "control": d["control"], "start": 1234, "end": 1334, "p": d["max_p"],
        "log_p": math.log(d["max_p"]), "prompt": f"{TEXT}(prompt of {rank})", "suffix": f"{TEXT}(suffix of {rank})",
        "also_in": [],
    }  # fmt: skip


def make_report(documents=None, **other):
    documents = documents or [
        document("alpha", windows=1000, memorized=250, max_p=0.97, mean_log_p=-3 * math.log(10)),
        document(NASTY, windows=3000, memorized=50, max_p=0.8, mean_log_p=-7 * math.log(10)),
        document("beta", windows=1, short=True, greedy={"starts": 0, "share": None, "exact": 0}, mean_log_p=-10.0),
        document("held out", control=True, windows=500, max_p=2e-7, mean_log_p=-16 * math.log(10)),
    ]
    p = [i % 9 / 8 for i in range(len(TEXT))]
    return {
        "format": 1, "title": f"Report {NASTY}", "checkpoint": "runs/x/000100.pt", "step": 1200,
        "parameters": 3_412_992, "positions": "rope", "unit": "token", "documents": documents,
        "settings": {"window": 100, "prompt": 50, "stride": 5, "greedy": 32, "map": "suffix"},
        "passages": [passage(i, d) for i, d in enumerate(sorted(documents, key=lambda d: -d["max_p"]))],
        "strips": [{"document": d["name"], "control": d["control"], "text": TEXT, "p": p} for d in documents],
        "checkpoints": [], "position_map": None,
    } | other  # fmt: skip


def checkpoints(documents, steps):
    means = {"mean_p": 0.1, "median_p": 0.1, "max_p": 0.5}
    return [
        {
            "step": step,
            "documents": [
                {"name": d["name"], "control": d["control"], **means, "mean_log_p": -900.0 + step,
                 "memorized": step / max(steps) / 2, "nats_per_token": 5 - step / max(steps)}
                for d in documents
            ],
        }
        for step in steps
    ]  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return read(memorization_page(make_report()))


def test_headline(found):
    [text] = found.texts("div", "lead")
    # 250 + 50 + 0 of 1000 + 3000 + 1 windows; two of three documents
    assert "2 of 3 trained documents can be recited" in text
    assert "300 of 4,001 windows (7.5%)" in text
    assert "“alpha”: 97%, 97 in 100." in text
    assert "Of 1 control document, never trained on, 0 of 500 windows" in text
    assert "the strongest is 1 in 5 million." in text
    gap = (1000 * -3 + 3000 * -7 + -10 / math.log(10)) / 4001 + 16
    assert round(gap) == 10 and "a trained suffix is 10¹⁰ times as likely" in text


def test_headline_without_memorized_windows_or_controls():
    [text] = read(memorization_page(make_report([document("a", memorized=0, max_p=1e-3)]))).texts("div", "lead")
    assert "0 of 1 trained document " in text and "none of 100 windows" in text
    assert "0.1%, 1 in 1,000" in text
    assert "no control documents" in text
    [text] = read(memorization_page(make_report([document("a", control=True)]))).texts("div", "lead")
    assert "no trained documents" in text and "times as likely" not in text


def test_strongest_passage_whose_p_underflows():
    documents = [document("a", max_p=0.5), document("c", control=True)]
    report = make_report(documents)
    documents[1].update(max_p=0.0)
    report["passages"][0].update(document="c", p=0.0, log_p=-2000 * math.log(10))
    [text] = read(memorization_page(report)).texts("div", "lead")
    assert "the strongest is 1 in 10²⁰⁰⁰" in text
    report["passages"] = []
    assert "the strongest is never" in read(memorization_page(report)).texts("div", "lead")[0]


def test_names_and_texts_are_escaped(found):
    assert found.texts("title")[0] == f"Report {NASTY}"
    assert found.texts("h1") == [f"Report {NASTY}"]
    cells = found.texts("td", "t")
    assert sum(cell.startswith(NASTY) for cell in cells) == 3, "in each of the three tables of documents"
    assert f"run of {NASTY}"[:79] + "…" in cells
    assert NASTY in found.texts("b"), "over its strip"


def test_rows_of_a_document(found):
    cells = [(a, text) for a, text in found.all("td")]
    flat = [text for _, text in cells]
    start = flat.index("alphanotes")
    assert flat[start : start + 11] == [
        "alphanotes", "5,000", "1,000", "0.121", "0.0152", "0.97", "500", "253", "252", "250", "125",
    ]  # fmt: skip
    assert [float(a["data-v"]) for a, _ in cells[start + 1 : start + 3]] == [5000, 1000]
    assert "betanotes, shorter than a window" in flat
    start = flat.index("alpha")
    assert flat[start : start + 7] == ["alpha", "62.5%", "12 of 77", "345", "run of alpha", "1.234", "0.457"]
    assert flat[flat.index("beta") + 1] == "-"
    [total] = found.texts("tr", "total")
    assert total.startswith("all20,0054,001")


def test_controls_have_their_own_group(found):
    groups = found.texts("tr", "group")
    assert groups[:2] == ["Trained on", "Control: never trained on"]
    bodies = found.texts("tbody")
    assert "held out" not in bodies[0] and "held out" in bodies[1] and "alpha" not in bodies[1]


def test_samples_table(found):
    [body] = [text for text in found.texts("table") if "n samples" in text]
    trained = [document("", windows=w)["discoverable"] for w in (1000, 3000, 1)]
    for n in ("1", "1000", "1000000"):
        for p in ("0.1", "0.5", "0.9"):
            number = sum(d[n][p] for d in trained)
            share = f"{100 * number / 4001:.3g}%"
            assert f"{number}{share}" in body
    assert "1,000,000" in body


def test_passages_have_their_text(found):
    passages = found.texts("article", "passage")
    assert len(passages) == 4
    assert passages[0].startswith("1. 97%, 97 in 100 alpha, 1,234 to 1,334")
    assert passages[3].startswith("4. 2.0·10⁻⁵%, 1 in 5 million held out (control), 1,234 to 1,334")
    for rank, text in enumerate(passages):
        assert text.endswith(f"{TEXT}(prompt of {rank}){TEXT}(suffix of {rank})")


def test_the_other_documents_with_the_text_of_a_passage_are_named():
    report = make_report()
    report["passages"][0]["also_in"] = [NASTY, *"bcdef"]
    passages = read(memorization_page(report)).texts("article", "passage")
    assert f"1,234 to 1,334; also in {NASTY}, b, c, d, e and 1 more" in passages[0]
    assert "also in" not in passages[1]


def test_strips_join_to_the_texts(found):
    strips = [text for a, text in found.all("div", "text")][4:]
    assert strips == [TEXT] * 4, "whitespace, line ends and all"
    titles = [
        a["title"] for tag, a, _, around in found.elements if tag == "span" and "details" in around and "title" in a
    ]
    assert "12.5% to 37.5%" in titles and "50% to 87.5%" in titles and "100%" in titles


def test_positions_are_explained_for_rope_and_drawn_if_learned():
    sentence = "P(z) does not depend on the offset in the frame"
    assert sentence in memorization_page(make_report())
    learned = memorization_page(make_report(positions="learned"))
    assert sentence not in learned and "Offset in the frame" not in learned
    documents = make_report()["documents"]
    means = {"mean_p": [0.5, 0.1, 0.0], "mean_log_p": [-1.0, -50.0, -2000.0], "best_p": 0.75, "best_offset": 77}
    rows = [{"name": d["name"], "control": d["control"], **means} for d in documents]
    drawn = {"offsets": [0, 64, 128], "documents": rows}
    html = memorization_page(make_report(positions="learned", position_map=drawn))
    page = read(html)
    assert sentence not in html and "Offset in the frame" in page.texts("h2")
    assert "tokens before the text" in page.texts("text")
    [lead] = page.texts("div", "lead")
    assert "offset 77 " in lead and "75%" in lead


def test_curves_over_checkpoints():
    report = make_report()
    assert "Over training" not in memorization_page(report)
    report["checkpoints"] = checkpoints(report["documents"], [100, 300, 200])
    report["checkpoints"][1]["documents"].pop(0)
    page = read(memorization_page(report))
    assert "Over training" in page.texts("h2")
    names = [text for tag, _, text, around in page.elements if tag == "title" and around[-2:] == ["svg", "g"]]
    assert names.count("held out (control)") == names.count("alpha") - 1 == 5, "four curves, thresholds; and a bar"
    assert "Loss" in page.texts("b") and "nats per token" in page.texts("text")


def test_many_documents_share_a_color():
    few = make_report([*(document(f"d{i}") for i in range(8)), document("c", control=True)])
    many = make_report([*(document(f"d{i}") for i in range(30)), document("c", control=True)])
    assert "d7" in read(memorization_page(few)).texts("span", "c7")
    page = read(memorization_page(many))
    assert page.texts("span", "c0") == ["30 trained documents"]
    assert page.texts("span", "ctl") == ["1 control document"]
    names = [text for tag, _, text, around in page.elements if tag == "title" and "svg" in around]
    assert {f"d{i}" for i in range(30)} <= set(names), "each line has its name on hover"


@pytest.mark.parametrize(
    ("empty", "without"),
    [("passages", "Strongest passages"), ("strips", "Where in the text"), ("documents", "How much of each document")],
)
def test_sections_may_be_empty(empty, without):
    whole, part = (
        read(memorization_page(report)).texts("h2") for report in (make_report(), make_report() | {empty: []})
    )
    assert without in whole and without not in part


def test_unknown_values_are_dashes():
    unknown = document("a", nats_per_token=math.nan, bits_per_byte=math.nan)
    page = read(memorization_page(make_report([unknown], title="", checkpoint="")))
    assert page.texts("h1") == ["What was memorized"]
    assert page.texts("p", "soft")[0].startswith("step 1,200, 3.41M parameters")
    assert page.texts("td").count("-") == 2 and "nan" not in page.texts("main")[0]


def test_without_greedy_decoding():
    page = read(memorization_page(make_report(settings={**make_report()["settings"], "greedy": 0})))
    assert "Loss" in page.texts("h3") and "longest verbatim run" not in page.texts("th")
    flat = page.texts("td")
    assert flat[flat.index("alpha") :][:3] == ["alpha", "1.234", "0.457"]
    assert "Greedy" not in page.texts("dt")


def test_the_unit_and_the_map_are_those_of_the_report():
    settings = {**make_report()["settings"], "map": "window"}
    page = read(memorization_page(make_report(unit="byte", settings=settings)))
    text = page.texts("body")[0]
    assert "Windows of 100 bytes" in text and "nats per token" not in text
    assert "in the prompt of a window as well" in page.texts("dd")[-1]


def test_the_page_depends_on_the_json_only():
    report = make_report()
    before = copy.deepcopy(report)
    first = memorization_page(report)
    assert report == before
    assert memorization_page(json.loads(json.dumps(report))) == first, "JSON is enough"


def test_limits_of_bars_and_passages():
    """Sixty bars of trained documents, the highest first, and as many of controls; forty passages."""
    documents = [document(f"d{i:02}", max_p=0.1 + i / 1000) for i in range(61)]
    page = read(memorization_page(make_report([*documents, document("c", control=True)])))
    assert len(page.texts("article")) == 40 and "22 more are in the JSON file." in page.texts("p", "soft")
    names = [text for tag, _, text, around in page.elements if tag == "text" and text[:1] == "d"]
    assert names[0] == "d60" and len(names) == 60 and "d00" not in names
    assert any("1 documents not drawn" in text for text in page.texts("p", "soft"))
    assert not any("not drawn" in text for text in read(memorization_page(make_report())).texts("p", "soft"))


def test_strips_that_fit_exactly_and_the_open_one(monkeypatch):
    monkeypatch.setattr(page_module, "_OPEN_CHARACTERS", 4)
    monkeypatch.setattr(page_module, "_MAX_CHARACTERS", 11)
    strips = [{"document": text, "control": False, "text": text, "p": [0.1] * len(text)} for text in ("abcde", "abcd")]
    third = {"document": "xy", "control": True, "text": "xy", "p": [1.0, 1.0]}
    page = read(memorization_page(make_report(strips=[*strips, third])))
    details = [(a, text) for a, text in page.all("details") if "characters" in text]
    assert ["open" in a for a, _ in details] == [False, True, False]
    assert "control, 2 characters" in details[2][1] and "5 characters" in details[0][1]
    monkeypatch.setattr(page_module, "_MAX_CHARACTERS", 10)
    soft = read(memorization_page(make_report(strips=[*strips, third]))).texts("p", "soft")
    assert "1 more are in the JSON file." in soft
    monkeypatch.setattr(page_module, "_MAX_CHARACTERS", 3)
    page = read(memorization_page(make_report(strips=strips)))
    assert len([text for text in page.texts("details") if "characters" in text]) == 1  # the first is always shown


def test_ratio_to_the_controls():
    """10 to the difference of the mean log P(z): with two digits up to 10⁴, as a power beyond."""
    for gap, text in ((3.98, "9500 times"), (4.0, "10⁴ times"), (-0.3, "0.5 times"), (-5, "10⁻⁵ times")):
        documents = [
            document("a", windows=1, mean_log_p=math.log(10) * gap - 20),
            document("c", control=True, mean_log_p=-20.0),
        ]
        assert text in read(memorization_page(make_report(documents))).texts("div", "lead")[0]


def test_axes_of_small_values():
    """Axes of percentages begin at 0 and end at 1% or above; those of P(z) end at 1, that of the loss begins at 0."""
    documents = [document("a", over=dict.fromkeys(("0.0001", "0.01", "0.1", "0.5", "0.9"), 0))]
    entries = checkpoints(documents, [10, 20])
    for entry in entries:
        entry["documents"][0].update(memorized=0.0, mean_p=0.0, mean_log_p=-30.0, nats_per_token=2.5)
    page = read(memorization_page(make_report(documents, checkpoints=entries)))
    ends = {}
    for _, figure in page.all("figure"):
        name = figure.strip().splitlines()[0]
        ends[name] = [line for line in figure.splitlines() if line.strip()]
    percents = ["0.00", "0.25", "0.50", "0.75", "1.00"]
    for name in ("Share of the windows with at least this P(z)", "Memorized: P(z) of 50% or more", "P(z), mean"):
        assert ends[name][1:6] == percents, name
    assert ends["P(z), geometric mean"][1:7] == ["10⁻¹⁵", "10⁻¹²", "10⁻⁹", "10⁻⁶", "0.001", "1"]
    assert float(ends["Loss"][1]) == 0
