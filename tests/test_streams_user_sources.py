"""User sources, from data.sources in the config to `niels-gpt train` and `eval`."""

import hashlib
import json
import os
import warnings
from pathlib import Path

import pytest

from niels_gpt.config import RunConfig, SourceConfig
from niels_gpt.config.yaml_file import load_config
from niels_gpt.streams import StreamBuildConfig, load_streams
from niels_gpt.training.tasks.registry import open_task
from tests.cache import split_rule
from tests.cli import call, error_of
from tests.training import SMALL, sentence

DELIMITER = "\n\n<dialogue>\n\n"
T = 16


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NIELS_GPT_DEBUG", raising=False)


def write(path, text):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def write_rows(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def make_notes(folder="diary", number=23):
    """name -> text of the files of a folder, in the order of their paths."""
    texts = {f"{i:02d}.{'md' if i % 2 else 'txt'}": f"# day {i}\r\n{sentence(i, 12)} é\n" for i in range(number)}
    for name, text in texts.items():
        write(Path(folder) / name, text)
    return texts


def make_chats(path="chats.jsonl", number=31):
    """The expected transcripts of the rows."""
    rows = []
    for i in range(number):
        turns = [("user", f"question {i}?"), ("assistant", sentence(i, 6))] * (1 + i % 2)
        rows.append([("system", "be brief."), *turns] if i % 5 == 0 else turns)
    write_rows(path, [{"id": i, "messages": [{"role": r, "content": c} for r, c in row]} for i, row in enumerate(rows)])
    return ["\n".join(f"{role}: {content}" for role, content in row) for row in rows]


def split(items, *, seed=42, share=0.10):
    """(train, held out)"""
    return tuple(split_rule(items, share, seed).values())


def streams(**user):
    """The streams of these sources; user: name -> options of the source."""
    sources = {name: SourceConfig(**options) for name, options in user.items()}
    cfg = StreamBuildConfig(
        user_sources=sources, enabled_sources=tuple(user), required_sources=tuple(user), cache_dir="cache"
    )
    return load_streams(cfg, T=T)


def config(*overrides, **user):
    """A small run on user sources, in equal shares."""
    names = list(user)
    shares = "{" + ", ".join(f"{name}: {1 / len(names)}" for name in names) + "}"
    options = [f"data.sources={json.dumps(user)}", f"train.p_train={shares}", f"train.p_val={shares}"]
    return load_config(None, overrides=[*SMALL, *options, "data.cache_dir=cache", *overrides])


# --- streams -----------------------------------------------------------------------------------------


def test_streams_of_a_folder_of_texts():
    texts = list(make_notes().values())
    found = streams(diary={"path": "diary"})
    assert list(found) == ["diary"]
    train, val = split(texts)
    assert len(val) == 2  # a tenth of 23
    assert found["diary"]["train"].data == "\n\n".join(train).encode("utf-8")
    assert found["diary"]["val"].data == "\n\n".join(val).encode("utf-8")
    assert found["diary"]["train"].sha256 == hashlib.sha256("\n\n".join(train).encode("utf-8")).hexdigest()


def test_streams_of_chats_are_transcripts():
    train, val = split(make_chats())
    found = streams(chats={"path": "chats.jsonl"})["chats"]
    assert len(val) == 3
    assert found["train"].data == DELIMITER.join(train).encode("utf-8")
    assert found["val"].data == DELIMITER.join(val).encode("utf-8")


def test_streams_of_rows_with_a_text():
    rows = [{"body": f"row {i} {sentence(i, 5)}", "text": "never this"} for i in range(12)]
    write_rows("rows.jsonl", [*rows[:6], {"body": None}, {"body": " "}, *rows[6:]])
    train, val = split([row["body"] for row in rows])
    found = streams(rows={"path": "rows.jsonl", "field": "body"})["rows"]
    assert found["train"].data == "\n\n".join(train).encode("utf-8")
    assert found["val"].data == "\n\n".join(val).encode("utf-8")


def test_split_depends_on_the_data_seed():
    texts = list(make_notes().values())
    for seed in (1, 42):
        task = open_task(config(f"data.seed={seed}", diary={"path": "diary"}))
        train, val = split(texts, seed=seed)
        assert task.streams["diary"]["val"].data == "\n\n".join(val).encode("utf-8")
        assert task.fingerprint() == {"diary": hashlib.sha256("\n\n".join(train).encode("utf-8")).hexdigest()}


def test_user_sources_beside_built_in_sources():
    make_notes()
    shares = ["train.p_train={roam: 0.5, diary: 0.5}", "train.p_val={diary: 1.0}"]
    task = open_task(config(*shares, diary={"path": "diary"}))
    assert set(task.streams) == {"roam", "diary"}
    assert {origin.source for step in range(6) for origin in task.origins(step)} == {"roam", "diary"}


def test_source_without_a_share_is_not_read():
    make_notes()
    task = open_task(config("train.p_train={diary: 1}", "train.p_val={diary: 1}", diary={"path": "diary"}))
    assert list(task.streams) == ["diary"]
    more = {"diary": {"path": "diary"}, "gone": {"path": "no such place"}}
    shares = ["train.p_train={diary: 1.0, gone: 0.0}", "train.p_val={diary: 1.0}"]
    assert list(open_task(config(*shares, **more)).streams) == ["diary"]


def test_sources_are_described():
    texts = make_notes()
    make_chats()
    settings = config(diary={"path": "diary"}, chats={"path": "chats.jsonl"})
    for cached in (False, True):
        diary, chats = open_task(settings).describe()
        state = "cached" if cached else "built"
        assert (diary.source, diary.path, diary.share) == ("diary", f"diary ({state})", 0.5)
        assert (diary.documents, chats.documents) == (23, 31)
        train, val = split(list(texts.values()))
        assert diary.train == len("\n\n".join(train).encode("utf-8"))
        assert diary.held_out == len("\n\n".join(val).encode("utf-8"))
        assert chats.path == f"chats.jsonl ({state})"


# --- provenance --------------------------------------------------------------------------------------


def test_origins_name_the_file_or_row_of_the_text():
    texts = make_notes()
    transcripts = make_chats()
    task = open_task(config(diary={"path": "diary"}, chats={"path": "chats.jsonl"}))
    seen, inside = set(), 0
    for step in range(30):
        for origin, ids in zip(task.origins(step), task.batch(step).x, strict=True):
            data = bytes(ids.tolist())
            assert origin.text == data.decode("utf-8", errors="replace")
            if origin.source == "diary":
                document, gap = texts[origin.document], "\n\n"
                assert document in split(list(texts.values()))[0]
            else:
                word, number = origin.document.split()
                assert word == "row"
                document, gap = transcripts[int(number)], DELIMITER
                assert document in split(transcripts)[0]
            here = (document + gap).encode("utf-8")[origin.offset :]
            assert here, "the offset is past the document and its separator"
            assert data[: len(here)] == here[:T]
            inside += len(here) >= T
            seen.add(origin.source)
    assert seen == {"diary", "chats"}
    assert inside > 60


def test_rows_are_numbered_as_in_the_file():
    rows = [{"text": None if i % 3 == 0 else f"this is row number {i}", "path": 7} for i in range(40)]
    write_rows("rows.jsonl", rows)
    task = open_task(config(rows={"path": "rows.jsonl"}))
    for step in range(10):
        for origin in task.origins(step):
            number = int(origin.document.removeprefix("row "))  # not the field named path
            here = (rows[number]["text"] + "\n\n")[origin.offset :]
            assert origin.text.startswith(here[:T])


# --- cache -------------------------------------------------------------------------------------------


def expect_rebuilt(user, texts, sep="\n\n"):
    (name,) = user
    found = streams(**user)[name]
    for part, documents in zip(("train", "val"), split(texts), strict=True):
        assert not found[part].cached
        assert found[part].data == sep.join(documents).encode("utf-8")
    assert all(stream.cached for stream in streams(**user)[name].values())


def test_changed_files_rebuild():
    texts = make_notes()
    user = {"diary": {"path": "diary"}}
    streams(**user)
    texts["05.md"] = "quite another text\n"
    write("diary/05.md", texts["05.md"])
    expect_rebuilt(user, list(texts.values()))
    texts["99.md"] = "one more text\n"
    write("diary/99.md", texts["99.md"])
    expect_rebuilt(user, list(texts.values()))


def test_changed_rows_with_the_same_time_rebuild():
    """As with files of an archive that all have the same time."""
    user = {"rows": {"path": "rows.jsonl"}}
    for version in ("first", "the second"):
        texts = [f"{version}, row {i}" for i in range(20)]
        write_rows("rows.jsonl", [{"text": text} for text in texts])
        os.utime("rows.jsonl", ns=(10**18, 10**18))
        expect_rebuilt(user, texts)


def test_changed_field_or_kind_rebuilds():
    rows = [
        {
            "text": f"text {i} of all",
            "body": f"body {i} of all",
            "messages": [{"role": "user", "content": f"talk {i}"}, {"role": "assistant", "content": "yes"}],
        }
        for i in range(20)
    ]
    write_rows("rows.jsonl", rows)
    path = {"path": "rows.jsonl"}
    for _ in range(2):
        expect_rebuilt({"rows": {**path, "kind": "text"}}, [row["text"] for row in rows])
        expect_rebuilt({"rows": {**path, "kind": "text", "field": "body"}}, [row["body"] for row in rows])
        expect_rebuilt({"rows": path}, [f"user: talk {i}\nassistant: yes" for i in range(20)], sep=DELIMITER)


def test_other_columns_rebuild():
    rows = [{"ask": f"q {i}", "one": f"first {i}", "two": f"second {i}"} for i in range(20)]
    write_rows("rows.jsonl", rows)
    for column in ("one", "two"):
        user = {"rows": {"path": "rows.jsonl", "columns": {"user": "ask", "assistant": column}}}
        texts = [f"user: {row['ask']}\nassistant: {row[column]}" for row in rows]
        expect_rebuilt(user, texts, sep=DELIMITER)


def test_chats_that_would_read_as_other_turns_are_dropped(caplog):
    rows = [{"prompt": f"question {i}", "completion": "a\nuser: b" if i == 3 else f"answer {i}"} for i in range(20)]
    write_rows("rows.jsonl", rows)
    texts = [f"user: question {i}\nassistant: answer {i}" for i in range(20) if i != 3]
    expect_rebuilt({"rows": {"path": "rows.jsonl"}}, texts, sep=DELIMITER)
    assert any("rows: dropped 1 chat" in record.getMessage() for record in caplog.records)


def test_a_chat_file_as_the_primer():
    rows = [{"instruction": f"question {i}", "input": "", "output": f"answer {i}"} for i in range(20)]
    write_rows("chats.jsonl", rows)
    shares = "{primer: 1.0}"
    options = ["data.primer=chats.jsonl", f"train.p_train={shares}", f"train.p_val={shares}"]
    task = open_task(load_config(None, overrides=[*SMALL, *options, "data.cache_dir=cache"]))
    found = [text for stream in task.streams["primer"].values() for text in stream.data.decode().split(DELIMITER)]
    assert sorted(found) == sorted(f"user: question {i}\nassistant: answer {i}" for i in range(20))


# --- errors ------------------------------------------------------------------------------------------


def test_file_that_is_not_utf8(tmp_path):
    texts = make_notes()
    (tmp_path / "diary" / "05.md").write_bytes(b"caf\xe9 " * 10)
    with pytest.raises(ValueError, match=r"05\.md.*offset 3"):
        open_task(config(diary={"path": "diary"}))
    task = open_task(config("data.encoding_errors=replace", diary={"path": "diary"}))
    everything = b"".join(stream.data for stream in task.streams["diary"].values())
    assert ("caf\ufffd " * 10).encode("utf-8") in everything
    assert len(texts) == len(task.streams["diary"]["train"].starts) + len(task.streams["diary"]["val"].starts)


def test_unknown_name_in_the_shares_lists_the_known_ones():
    key = "p_val"
    make_notes()
    with pytest.raises(ValueError) as caught:
        open_task(config(f"train.{key}={{dairy: 1.0}}", diary={"path": "diary"}))
    for part in (f"train.{key}", "'dairy'", "wiki", "roam", "primer", "diary"):
        assert part in str(caught.value)


# --- config ------------------------------------------------------------------------------------------


def test_sources_of_a_config_file():
    write(
        "c.yaml",
        """
        data:
          sources:
            diary: {path: ~/diary}
            Talks-2_b: {path: talks.jsonl, kind: chat, field: turns, licence: CC0}
        """,
    )
    assert load_config("c.yaml").data.sources == {
        "diary": SourceConfig(path="~/diary", kind="auto", field="", licence=""),
        "Talks-2_b": SourceConfig(path="talks.jsonl", kind="chat", field="turns", licence="CC0"),
    }
    assert RunConfig().data.sources == {}


# --- training ----------------------------------------------------------------------------------------

CONFIG = """
model: {T: 16, C: 16, L: 1, H: 2}
train:
  total_steps: 3
  warmup_steps: 0
  B: 4
  p_train: {diary: 0.5, chats: 0.3, roam: 0.2}
  p_val: {diary: 0.5, chats: 0.5}
data:
  wiki: wiki
  sources:
    diary: {path: diary}
    chats: {path: chats.jsonl}
output: {eval_every: 2, eval_steps: 2, sample_tokens: 4}
"""


def make_wiki():
    for part in ("train", "validation"):
        write(f"wiki/{part}.txt", f"a row of {part}\nanother row of text\n" * 5)


def test_train_eval_and_batch_show(capsys):
    texts = list(make_notes().values())
    transcripts = make_chats()
    make_wiki()
    write("user.yaml", CONFIG)
    assert call("train", "--config", "user.yaml", "--run-dir", "out") == 0
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert list(lines[-1]["evals"]) == ["val_diary", "val_chats"]
    capsys.readouterr()

    assert call("eval", "--run", "out", "--json") == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert set(scores) == {"val_wiki", "val_roam", "val_chat", "val_diary", "val_chats"}
    assert scores["val_diary"]["bytes"] == len("\n\n".join(split(texts)[1]).encode("utf-8")) - 1
    assert scores["val_chats"]["bytes"] == len(DELIMITER.join(split(transcripts)[1]).encode("utf-8")) - 1
    assert all(0 < score["bits_per_byte"] < 12 for score in scores.values())

    assert call("research", "batch", "show", "--run", "out", "--step", 0, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4 and {row["source"] for row in rows} <= {"diary", "chats", "roam"}

    assert call("train", "--resume", "--run-dir", "out", "--steps", 5, "--allow-config-change") == 0
    write("diary/00.txt", "changed")
    assert call("train", "--resume", "--run-dir", "out", "--steps", 6, "--allow-config-change") == 1
    assert "diary" in capsys.readouterr().err


def test_eval_ignores_broken_sources_without_a_share(capsys):
    """Such sources are in the config for `niels-gpt data`."""
    make_notes()
    make_wiki()
    write("tiny/a.txt", "a")
    sources = {name: {"path": path} for name, path in (("diary", "diary"), ("gone", "nowhere"), ("short", "tiny"))}
    write("user.yaml", json.dumps({"data": {"sources": sources}}))
    small = ["--set=model={T: 16, C: 16, L: 1, H: 2}", "--set=train={B: 2, warmup_steps: 0}", "--steps", 1]
    shares = ["--set=train.p_train={diary: 1.0}", "--set=train.p_val={diary: 1.0}"]
    assert call("train", "--config", "user.yaml", "--run-dir", "out", *small, *shares) == 0
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert call("eval", "--run", "out", "--wiki", "wiki", "--json") == 0
    assert "val_diary" in json.loads(capsys.readouterr().out)["scores"]


@pytest.mark.parametrize(
    ("sources", "shares", "mentioned"),
    [
        ("{gone: {path: no such place}}", "{gone: 1.0}", ["gone", "no such place"]),
        ("{empty: {path: empty}}", "{empty: 1.0}", ["empty", ".txt"]),
        ("{diary: {path: diary}}", "{dairy: 1.0}", ["'dairy'", "diary"]),
    ],
)
def test_user_error_is_one_line_before_training(capsys, sources, shares, mentioned):
    make_notes()
    Path("empty").mkdir()
    write("user.yaml", f"data: {{sources: {sources}}}\ntrain: {{p_train: {shares}, p_val: {shares}}}\n")
    assert call("train", "--config", "user.yaml", "--run-dir", "out") == 1
    message = error_of(capsys)
    for part in mentioned:
        assert part in message
    assert not Path("out/checkpoints").exists()
