"""`niels-gpt data`: list, show and stats. `data lint` has its own file."""

import gzip
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import datasets  # now, while the environment says offline: it reads that once
import huggingface_hub
import pytest

from niels_gpt.cli import data
from tests.cli import call, error_of

ROOT = Path(__file__).parents[2]
BUILT_IN = ["fineweb_edu", "wikitext", "gutenberg", "dolly15k", "oasst1", "roam", "primer", "stdlib"]
IDS = {
    "fineweb_edu": "HuggingFaceFW/fineweb-edu",
    "wikitext": "wikitext",
    "gutenberg": "nikolina-p/gutenberg_clean_en_splits",
    "dolly15k": "databricks/databricks-dolly-15k",
    "oasst1": "OpenAssistant/oasst1",
}
DOLLY = [
    {
        "instruction": f"ask {i}?" * (i + 1),
        "context": f"context {i}" if i % 3 == 0 else "",
        "response": f"answer {i}",
        "category": "open_qa",
    }
    for i in range(7)
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    """An empty working directory and cache, an environment that does not say offline, a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "NIELS_GPT_DATA", "NIELS_GPT_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def write(path, text):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write_rows(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_config(**sources):
    """Write c.yaml with own sources."""
    return write("c.yaml", json.dumps({"data": {"sources": sources}}))  # JSON is YAML


def out(capsys, *arguments):
    """Return what a command prints; it must succeed, and print nothing to stderr but dropped rows by reason."""
    assert call("data", *arguments) == 0
    output, errors = capsys.readouterr()
    assert all("dropped" in line for line in errors.splitlines()), errors
    return output


def refused(capsys, *arguments):
    """Return the error message of a command that must fail."""
    assert call("data", *arguments) == 1
    return error_of(capsys)


def printed_json(capsys, *arguments):
    return json.loads(out(capsys, *arguments, "--json"))


def shown(capsys, *arguments):
    """Return the samples that `show --json` prints, one per line."""
    lines = out(capsys, "show", *arguments, "--json").split("\n")
    assert lines.pop() == ""
    return [json.loads(line) for line in lines]


def dolly_text(row):
    context = f"\n\ncontext:\n{row['context']}" if row["context"] else ""
    return [row["instruction"] + context, row["response"]]


# --- list --------------------------------------------------------------------------------------------


def test_list(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")  # lines are not wrapped
    head, *lines = out(capsys, "list").splitlines()
    assert head.split() == ["name", "kind", "from", "licence", "path", "or", "id"]
    assert max(map(len, (head, *lines))) <= 100
    assert [line.split()[0] for line in lines] == BUILT_IN
    for line in lines:
        name, kind, origin = line.split()[:3]
        assert kind == ("chat" if name in ("dolly15k", "oasst1", "primer") else "text")
        assert origin == ("hub" if name in IDS else "embedded")
        if name in IDS:
            assert IDS[name] in line.split()
    assert "CC BY-SA 3.0" in lines[3] and "Apache-2.0" in lines[4] and "ODC-By" in lines[0]


def test_list_json(capsys, monkeypatch):
    write_rows("data-here/oasst1/train.jsonl", [{}])
    monkeypatch.setenv("NIELS_GPT_DATA", "data-here")
    write(".roam-data/a.md", "a note")
    rows = {row["name"]: row for row in printed_json(capsys, "list")}
    assert {name: row["id"] for name, row in rows.items()} == {name: IDS.get(name) for name in BUILT_IN}
    assert (rows["wikitext"]["from"], rows["wikitext"]["place"]) == ("hub", "wikitext")
    assert (rows["oasst1"]["from"], Path(rows["oasst1"]["place"])) == ("local", Path("data-here/oasst1"))
    assert (rows["roam"]["from"], rows["roam"]["place"]) == ("local", ".roam-data")


def test_list_offline(capsys):
    rows = {row["name"]: row["from"] for row in printed_json(capsys, "list", "--offline")}
    assert rows == {name: "missing" if name in IDS else "embedded" for name in BUILT_IN}
    table = out(capsys, "list", "--offline")
    assert table.count(" missing ") == 5 and "NIELS_GPT_DATA" in table


def test_list_with_own_sources(capsys):
    write("poems/a.txt", "roses")
    write_config(poems={"path": "poems", "licence": "CC0"}, gone={"path": "no such place"})
    rows = [row["name"] for row in printed_json(capsys, "list", "--config", "c.yaml")]
    assert rows == [*BUILT_IN, "poems", "gone"]
    *_, poems, gone = out(capsys, "list", "--config", "c.yaml").splitlines()
    assert poems.split() == ["poems", "text", "local", "CC0", "poems"]
    assert "missing" in gone and "no such place" in gone


# --- show --------------------------------------------------------------------------------------------


def test_show_text(capsys):
    write("notes/a.md", "# first\n\n[bold]not markup[/bold] :smile: [[link]]\n")
    write("notes/b.md", "second " + "word " * 60 + "end")
    write("notes/c.md", "third")
    write("notes/d.md", "fourth")
    output = out(capsys, "show", "roam", "--path", "notes")
    assert "[bold]not markup[/bold] :smile: [[link]]" in output
    assert "second " + "word " * 60 + "end" in output  # not broken into lines
    assert "third" in output and "fourth" not in output
    assert [line for line in output.splitlines() if line.startswith(("1. ", "2. ", "3. ", "4. "))] == [
        "1. roam  path=a.md",
        "2. roam  path=b.md",
        "3. roam  path=c.md",
    ]


def test_show_chat(capsys):
    write_rows("dolly.jsonl", DOLLY)
    output = out(capsys, "show", "dolly15k", "--path", "dolly.jsonl", "-n", 2)
    wanted = ["user: ask 0?", "", "context:", "context 0", "assistant: answer 0"]
    lines = output.splitlines()
    assert lines[0].startswith("1. dolly15k  ") and "category=open_qa" in lines[0] and "row=0" in lines[0]
    assert lines[1:6] == wanted
    assert lines[6] == "" and lines[7].startswith("2. dolly15k  ")
    assert lines[8:] == ["user: ask 1?ask 1?", "assistant: answer 1"]


def test_show_json_has_one_complete_sample_per_line(capsys):
    write_rows("dolly.jsonl", DOLLY)
    samples = shown(capsys, "dolly15k", "--path", "dolly.jsonl", "-n", 50)
    assert samples == [
        {
            "messages": [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), dolly_text(row), strict=True)
            ],
            "source": "dolly15k",
            "meta": {"category": "open_qa", "row": i},
        }
        for i, row in enumerate(DOLLY)
    ]
    assert len(shown(capsys, "dolly15k", "--path", "dolly.jsonl")) == 3
    write("notes/a.md", "é\u2028\n" + "long " * 500)
    (note,) = shown(capsys, "roam", "--path", "notes")
    assert note == {"text": "é\u2028\n" + "long " * 500, "source": "roam", "meta": {"path": "a.md"}}
    write_rows("rows.jsonl", [{"text": "t", "date": "2024-01-02T03:04:05"}])
    (sample,) = shown(capsys, "fineweb_edu", "--path", "rows.jsonl")
    assert sample["meta"]["date"].startswith("2024-01-02")


def test_show_cuts_long_texts(capsys):
    write("notes/a.md", "x" * 1000)
    assert "x" * 400 + "... (1,000 characters)\n" in out(capsys, "show", "roam", "--path", "notes")
    assert "\nxxxxx... (1,000 characters)\n" in out(capsys, "show", "roam", "--path", "notes", "--chars", 5)
    for chars in (0, 1000, 2000):
        output = out(capsys, "show", "roam", "--path", "notes", "--chars", chars)
        assert "\n" + "x" * 1000 + "\n" in output and "characters" not in output


def test_show_shuffled(capsys):
    write_rows("dolly.jsonl", DOLLY)
    options = ["dolly15k", "--path", "dolly.jsonl", "-n", 7]
    one, two, again = (
        [sample["meta"]["row"] for sample in shown(capsys, *options, "--shuffle", "--seed", seed)] for seed in (1, 2, 2)
    )
    assert sorted(one) == sorted(two) == list(range(7))
    assert one != two == again
    assert [sample["meta"]["row"] for sample in shown(capsys, *options, "--seed", 2)] == list(range(7))


def test_show_a_split_and_a_subset(capsys, hub):
    hub.rows = {"train": ["of train"], "validation": ["of validation"], "test": ["of test"]}
    for split in ("train", "validation", "test"):
        (sample,) = shown(capsys, "wikitext", "--split", split, "--subset", "wikitext-2-raw-v1")
        assert sample["text"] == f"of {split}"
    assert set(hub.calls) == {("wikitext", "wikitext-2-raw-v1")}
    (sample,) = shown(capsys, "fineweb_edu")
    assert hub.calls[-1] == ("HuggingFaceFW/fineweb-edu", "CC-MAIN-2024-10")


def test_show_an_own_source(capsys):
    write_rows("rows.jsonl", [{"body": f"poem {i}", "n": i} for i in range(4)])
    write_rows("others.jsonl", [{"body": "another"}])
    write_config(poems={"path": "rows.jsonl", "field": "body"})
    samples = shown(capsys, "poems", "--config", "c.yaml", "-n", 2)
    assert samples == [{"text": f"poem {i}", "source": "poems", "meta": {"n": i, "row": i}} for i in range(2)]
    (other,) = shown(capsys, "poems", "--config", "c.yaml", "--path", "others.jsonl")
    assert other["text"] == "another"


ALPACA = [{"instruction": f"do {i}", "input": "", "output": f"done {i}"} for i in range(4)]


def test_show_a_chat_file_by_its_path(capsys):
    write("alpaca.json", json.dumps(ALPACA))
    first, _, head, *lines = out(capsys, "show", "alpaca.json", "-n", 1).splitlines()
    assert "Alpaca" in first and "instruction, input, output" in first
    assert "alpaca.json" in head and lines == ["user: do 0", "assistant: done 0"]
    samples = shown(capsys, "alpaca.json", "-n", 2, "--shuffle")
    assert all([m["role"] for m in sample["messages"]] == ["user", "assistant"] for sample in samples)
    assert "Alpaca" in out(capsys, "show", "primer", "--path", "alpaca.json", "-n", 1)


def test_columns_by_options(capsys):
    write_rows("qa.jsonl", [{"frage": "a?", "antwort": "b.", "thema": "t"}])
    message = refused(capsys, "show", "qa.jsonl")
    assert all(part in message for part in ("frage, antwort, thema", "--field", "--columns user="))
    (chat,) = shown(capsys, "qa.jsonl", "--columns", "user=frage, assistant=antwort,system=thema")
    assert [(m["role"], m["content"]) for m in chat["messages"]] == [
        *(("system", "t"), ("user", "a?"), ("assistant", "b.")),
    ]
    (text,) = shown(capsys, "qa.jsonl", "--field", "antwort")
    assert text["text"] == "b."
    for wrong in ("frage", "user=frage", "user=frage,bot=antwort", "user=,assistant=antwort"):
        assert "assistant" in refused(capsys, "show", "qa.jsonl", "--columns", wrong)
    assert "frage, antwort, thema" in refused(capsys, "show", "qa.jsonl", "--columns", "user=x,assistant=y")
    assert "primer" in refused(capsys, "show", "primer", "--field", "text")
    assert "'gone.jsonl'" in refused(capsys, "stats", "gone.jsonl")
    write_config(qa={"path": "qa.jsonl"})
    message = refused(capsys, "show", "qa", "--config", "c.yaml")
    assert "data.sources.qa" in message and "columns: {user:" in message and "--field" not in message


# --- stats -------------------------------------------------------------------------------------------


def test_stats_of_texts(capsys, tmp_path):
    texts = ["é" * n for n in (1, 2, 3, 10, 100, 1000)]
    write_rows("pages.jsonl", [{"text": text, "language": "fr" if len(text) > 5 else "en"} for text in texts])
    with Path("pages.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": ""}\n{"text": null}\n{"text": " "}\n')
    summary = printed_json(capsys, "stats", "fineweb_edu", "--path", "pages.jsonl")
    assert summary == {
        "source": "fineweb_edu",
        "split": "train",
        "samples": 6,
        "characters": 1116,
        "bytes": 2232,
        "mean_length": 186.0,
        "length_quantiles": {"min": 1, "10 %": 1, "median": 3, "90 %": 100, "99 %": 100, "max": 1000},
        "languages": {"en": 3, "fr": 3},
        "dropped": {"empty": 2, "without text": 1},
        "png": None,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["pages.jsonl"]


def test_stats_as_a_table(capsys, tmp_path):
    rows = [{"messages": [{"role": r, "content": "xx"} for r in ("user", "assistant")], "lang": "de"}] * 1500
    rows += [{"messages": [{"role": r, "content": "y"} for r in ("system", "user", "assistant")], "lang": "en"}] * 2
    rows += [{"messages": [], "lang": "en"}] * 1234
    write_rows("chats.jsonl", rows)
    write_config(mine={"path": "chats.jsonl"})
    output = out(capsys, "stats", "mine", "--config", "c.yaml", "--png", "pictures/of [bold]mine[/].png")
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert lines[0] == "mine, train: 1,502 samples"
    assert lines[1].startswith("characters 6,006 ")
    assert lines[2] == "length min 3 10 % 4 median 4 90 % 4 99 % 4 max 4 mean 4.0"
    assert "languages de: 1,500 en: 2" in lines
    assert "turns 3,006 in all; per sample 2: 1,500 3: 2" in lines
    assert "format chats: messages (messages)" in lines
    assert "user 1,502 messages, 3,002 characters" in lines
    assert "system 2 messages, 2 characters" in lines and "assistant 1,502 messages, 3,002 characters" in lines
    assert "dropped 1,234 without messages" in lines
    bars = [line.split() for line in output.splitlines() if "█" in line or "▏" in line]
    assert [(bar[:-2], bar[-1]) for bar in bars] == [(["2", "to", "3"], "2"), (["4", "to", "7"], "1,500")]
    assert set(bars[1][-2]) == {"█"} and len(bars[0][-2]) == 1
    assert lines[-1].endswith(str(Path("pictures/of [bold]mine[/].png")))
    assert (tmp_path / "pictures" / "of [bold]mine[/].png").read_bytes().startswith(b"\x89PNG")
    assert not Path("data").exists()


def test_stats_of_a_chat_file(capsys):
    rows = [{"messages": [{"role": r, "content": "x"} for r in ("user", "assistant") * n]} for n in range(1, 13)]
    write_rows("chats.jsonl", rows)
    summary = printed_json(capsys, "stats", "chats.jsonl")
    assert summary["turns"] == {str(2 * n): 1 for n in range(1, 13)}
    assert summary["format"] == "chats: messages (messages)"
    lines = [" ".join(line.split()) for line in out(capsys, "stats", "chats.jsonl").splitlines()]
    (turns,) = [line for line in lines if line.startswith("turns ")]
    assert turns.startswith("turns 156 in all") and turns.endswith("16: 1 more: 4")


@pytest.mark.parametrize(("columns", "bar"), [(40, 10), (65, 25), (80, 40), (81, 40)])
def test_stats_in_a_narrow_terminal_keep_every_number(capsys, monkeypatch, columns, bar):
    write_rows("pages.jsonl", [{"text": "x" * 1234567}, {"text": "y"}])
    monkeypatch.setenv("COLUMNS", str(columns))
    output = out(capsys, "stats", "fineweb_edu", "--path", "pages.jsonl")
    for number in ("1,234,568", "1,234,567", "617,284.0"):
        assert number in output
    assert {line.count("█") for line in output.splitlines()} == {0, bar}


def test_stats_of_the_first_samples(capsys):
    write_rows("dolly.jsonl", DOLLY)
    first = [dolly_text(row) for row in DOLLY[:2]]
    summary = printed_json(capsys, "stats", "dolly15k", "--path", "dolly.jsonl", "--take", 2)
    assert (summary["samples"], summary["characters"]) == (2, sum(len(text) for pair in first for text in pair))
    assert "2 samples (the first 2)" in out(capsys, "stats", "dolly15k", "--path", "dolly.jsonl", "--take", 2)
    assert "the first" not in out(capsys, "stats", "dolly15k", "--path", "dolly.jsonl", "--take", 20)
    write_rows("rows/train.jsonl", DOLLY)
    write_rows("rows/validation.jsonl", DOLLY[:1])
    summary = printed_json(capsys, "stats", "dolly15k", "--path", "rows", "--split", "validation")
    assert (summary["split"], summary["samples"]) == ("validation", 1)


def test_stats_of_a_huge_source_are_of_its_first_ten_thousand(capsys, hub, monkeypatch):
    assert data.LARGE_TAKE == 10_000
    monkeypatch.setattr(data, "LARGE_TAKE", 10)
    hub.rows = {"train": [f"page {i}" for i in range(13)], "validation": ["v"], "test": ["t"]}
    assert printed_json(capsys, "stats", "fineweb_edu")["samples"] == 10
    assert printed_json(capsys, "stats", "wikitext")["samples"] == 13
    assert printed_json(capsys, "stats", "fineweb_edu", "--take", 11)["samples"] == 11
    write_rows("here/fineweb-edu/train.jsonl", [{"text": "x"}] * 13)
    assert printed_json(capsys, "stats", "fineweb_edu", "--path", "here/fineweb-edu")["samples"] == 13
    monkeypatch.setenv("NIELS_GPT_DATA", "here")
    assert printed_json(capsys, "stats", "fineweb_edu")["samples"] == 13


# --- mistakes ----------------------------------------------------------------------------------------


def prepare():
    write_rows("rows/train.jsonl", DOLLY)
    write("notes/a.md", "a note")
    write("blank/a.md", " \n")
    write("bad.jsonl", '{"instruction": "a", "response": "b"}\n{"instruction": \n')
    Path("cut.jsonl.gz").write_bytes(gzip.compress(b'{"instruction": "a", "response": "b"}\n' * 99)[:-20])
    Path("latin").mkdir()
    Path("latin/a.md").write_bytes(b"caf\xe9")
    write_config(mine={"path": "notes"}, gone={"path": "no such place"})
    write("typo.yaml", "data: {sources: {mine: {paht: notes}}}")


@pytest.mark.parametrize(
    ("options", "mentioned"),
    [
        ("dolly", ["'dolly'", "dolly15k", "stdlib"]),
        ("dolly15k --path rows --split tset", ["'tset'", "train", "rows"]),
        ("dolly15k --path nowhere", ["nowhere", "databricks/databricks-dolly-15k"]),
        ("dolly15k --subset big", ["dolly15k", "'big'"]),
        ("dolly15k --path bad.jsonl", ["bad.jsonl", "line 2"]),
        ("roam --path latin", ["a.md", "offset 3", "--encoding-errors"]),
        ("mine --config typo.yaml", ["data.sources.mine.paht", "path"]),
        ("gone --config c.yaml", ["gone", "no such place"]),
        ("mine --config c.yaml --path elsewhere", ["elsewhere"]),
    ],
)
def test_a_mistake_is_one_line(capsys, tmp_path, options, mentioned):
    prepare()
    command = "show" if len(options) % 2 else "stats"  # both read the same way
    assert call("data", command, *options.split()) == 1
    message = error_of(capsys)
    for part in mentioned:
        assert part in message
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("command", ["show", "stats"])
def test_no_sample_is_an_error(capsys, tmp_path, command):
    prepare()
    assert call("data", command, "roam", "--path", "blank") == 1
    output, errors = capsys.readouterr()
    last = errors.splitlines()[-1]  # lines before it may report dropped rows
    assert output == ""
    assert last.startswith("error: ") and "roam" in last and "'train'" in last
    assert not (tmp_path / "data").exists()


def test_the_remedy_for_other_encodings(capsys):
    prepare()
    assert "caf\ufffd" in out(capsys, "show", "roam", "--path", "latin", "--encoding-errors", "replace")
    Path("replace.yaml").write_text("data: {encoding_errors: replace}", encoding="utf-8")
    assert "caf\ufffd" in out(capsys, "show", "roam", "--path", "latin", "--config", "replace.yaml")


@pytest.mark.parametrize(("command", "name"), [("show", "fineweb_edu"), ("stats", "wikitext")])
def test_offline_without_data_names_both_remedies(capsys, monkeypatch, command, name):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: asked.append(args))
    assert call("data", command, name, "--offline") == 1
    message = error_of(capsys)
    assert IDS[name] in message
    assert "Hub" in message and "--offline" in message
    assert "--path" in message and "NIELS_GPT_DATA" in message and IDS[name].rpartition("/")[2] in message
    assert asked == []
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_damaged_file_is_one_line_of_the_process():
    """The libraries below print nothing beside it."""
    prepare()
    file = "cut.jsonl.gz"
    command = [sys.executable, "-m", "niels_gpt", "data", "show", "dolly15k", "--path", file]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and file in line


@pytest.mark.parametrize(
    "options", ["show roam -n 0", "show roam --chars -1", "stats roam --take 0", "show", "lits", "show roam --seed -1"]
)
def test_usage(capsys, options):
    assert call("data", *options.split()) == 2
    assert "Usage: niels-gpt data" in capsys.readouterr().err
