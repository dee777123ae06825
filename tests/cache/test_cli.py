import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from niels_gpt.cache import cli as cache_cli
from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.writing.shards import ShardWriter
from niels_gpt.cli import main as full_cli
from niels_gpt.tokenizer import SPECIAL_TOKENS, train_tokenizer
from tests.cache import (
    SPLITS,
    check_sft,
    digests,
    meta_of,
    no_waiting,
    read_tokens,
    real_tokenizer,
    split_rule,
    tree,
)
from tests.cache.sources.inputs import (
    BOOKS,
    DIALOGUES,
    DOLLY,
    LINES,
    PAGES,
    as_rows,
    by_budget,
    documents_of,
    dolly_example,
    messages,
    reference,
    stream_of,
    swap,
    write,
    write_dialogues,
    write_everything,
    write_notes,
    write_rows,
)

ROOT = Path(__file__).parents[2]
PRETRAIN, SFT = ("fineweb_edu", "roam", "wikitext", "gutenberg"), ("dolly15k", "oasst1", "primer")
ON_HUB = {
    "fineweb_edu": "HuggingFaceFW/fineweb-edu",
    "wikitext": "wikitext",
    "gutenberg": "nikolina-p/gutenberg_clean_en_splits",
    "dolly15k": "databricks/databricks-dolly-15k",
    "oasst1": "OpenAssistant/oasst1",
}
SMALL = [
    "--fineweb-train-tokens=400",
    "--fineweb-val-tokens=50",
    "--gutenberg-train-tokens=600",
    "--gutenberg-val-tokens=100",
    "--shard-bytes=256",
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty working directory and a wide terminal, without fsync."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("NIELS_GPT_DATA", "NIELS_GPT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    with no_waiting():
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The option for a small tokenizer."""
    return f"--tokenizer={write(tmp_path_factory.mktemp('tokenizer') / 'spm.model', real_tokenizer().model)}"


@pytest.fixture(scope="module")
def other_tokenizer(tmp_path_factory):
    return f"--tokenizer={train_tokenizer(PAGES + BOOKS, tmp_path_factory.mktemp('other'), vocab_size=300)}"


def prepare_everything(monkeypatch):
    """Local files of all sources: Hub sources in NIELS_GPT_DATA, notes, dialogues, and user sources in c.yaml."""
    monkeypatch.setenv("NIELS_GPT_DATA", str(write_everything().absolute()))
    write_notes(".roam-data")
    write_dialogues("data/primer.txt")
    write("poems/a.txt", "a poem of the model")
    write("poems/b.md", "another poem")
    write_rows("rows.jsonl", [{"n": i, "body": f"row {i} of mine"} for i in range(10)])
    write_rows("chats.jsonl", [{"messages": messages(turns)} for turns in DIALOGUES])
    config = {"poems": {"path": "poems"}, "rows": {"path": "rows.jsonl"}, "chats": {"path": "chats.jsonl"}}
    write("c.yaml", json.dumps({"data": {"sources": config}}))  # JSON is YAML


@pytest.fixture
def everything(monkeypatch):
    prepare_everything(monkeypatch)


def call(*arguments, entry="niels-gpt cache"):
    """Run a cache command; its exit code."""
    words = [str(argument) for argument in arguments]
    with warnings.catch_warnings():  # the commands replace warnings.showwarning
        try:
            if entry == "niels-gpt cache":
                full_cli.main(["cache", *words])
            else:
                cache_cli.main(words)
        except SystemExit as end:
            return end.code or 0
    return 0


@pytest.fixture
def run(capsys):
    """A function that runs a command: (exit code, stdout, stderr)."""

    def run(*arguments, **options):
        capsys.readouterr()
        code = call(*arguments, **options)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


@pytest.fixture
def succeed(run):
    """The same for a command that must succeed with an empty stderr; its output."""

    def succeed(*arguments, **options):
        code, out, err = run(*arguments, **options)
        assert (code, err) == (0, ""), err
        return out

    return succeed


@pytest.fixture
def error(run):
    """The same for a user error, which must print one line to stderr and nothing to stdout; the message."""

    def error(*arguments, **options):
        code, out, err = run(*arguments, **options)
        assert (code, out) == (1, ""), out
        assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
        return err.removeprefix("error: ").rstrip("\n")

    return error


def table(out):
    """{cache: state} of the table of a build."""
    head, *rows = [line for line in out.splitlines() if line.strip()]
    assert head.split()[0] == "cache"
    return {row.split()[0]: re.match(r"\S+ +(built|up to date|failed|not built)\b", row)[1] for row in rows}


def printed(out):
    """{cache: entry} of the JSON output of a build."""
    return {entry["name"]: entry for entry in json.loads(out)}


# --- build-all ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ["niels-gpt cache", "python -m niels_gpt.cache.cli"])
def test_build_all(everything, succeed, tokenizer, entry):
    out = succeed("build-all", "--cache-dir", "cache", "--seed", 42, tokenizer, *SMALL, entry=entry)
    assert table(out) == dict.fromkeys((*PRETRAIN, *SFT), "built")
    names = {str(path.relative_to("cache")) for path in Path("cache").rglob("*")}
    wanted = {"tokenizer", "tokenizer/spm.model", "tokenizer/meta.json", "pretrain", "sft"}
    for name in PRETRAIN:
        wanted |= {f"pretrain/{name}", f"pretrain/{name}/meta.json"}
        for split in SPLITS:
            shards = -(-meta_of(Path("cache/pretrain") / name)[f"{split}_tokens"] * 2 // 256)
            wanted |= {f"pretrain/{name}/{split}", f"pretrain/{name}/{split}/documents.npy"}
            wanted |= {f"pretrain/{name}/{split}/shard_{i:05d}.bin" for i in range(shards)}
    for name in SFT:
        wanted |= {f"sft/{name}", f"sft/{name}/meta.json"}
        wanted |= {f"sft/{name}/{split}_{file}" for split in SPLITS for file in ("tokens.bin", "idx.npy")}
    assert names == wanted
    assert documents_of(Path("cache/pretrain/wikitext"), "val") == [
        line for line in LINES["validation"] if line.strip()
    ]
    wanted = by_budget(BOOKS, train=600, val=100)
    assert {split: stream_of(Path("cache/pretrain/gutenberg"), split) for split in SPLITS} == wanted
    kept = [dolly_example(row) for row in DOLLY]
    check_sft(Path("cache/sft/dolly15k"), kept, tokenizer=reference(), val_frac=0.1, seed=42)


def test_entry_points_and_workers_give_the_same_bytes(everything, succeed, tokenizer):
    succeed("build-all", "--cache-dir", "one", "--workers", 1, tokenizer, *SMALL, "--config", "c.yaml")
    succeed("build-all", "--cache-dir", "four", "--workers", 4, tokenizer, *SMALL, "--config", "c.yaml",
         entry="python -m niels_gpt.cache.cli")  # fmt: skip
    assert digests(Path("one")) == digests(Path("four"))
    assert len(digests(Path("one"))) > 50


def test_second_build_is_up_to_date(everything, succeed, tokenizer):
    options = ["build-all", *SMALL, "--config", "c.yaml"]
    assert set(table(succeed(*options, tokenizer)).values()) == {"built"}
    before = {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*")}
    names = [*PRETRAIN, *SFT, "poems", "rows", "chats"]
    assert table(succeed(*options)) == dict.fromkeys(names, "up to date")  # with the tokenizer of the folder
    assert {path: path.stat().st_mtime_ns for path in Path("cache").rglob("*")} == before
    complete = tree(Path("cache"))
    assert set(table(succeed(*options, "--force")).values()) == {"built"}
    assert tree(Path("cache")) == complete


def test_only_changed_caches_are_rebuilt(everything, succeed, tokenizer):
    options = ["build-all", tokenizer, *SMALL]
    succeed(*options)
    swap(".roam-data/a/note 0.md", b"model", b"mould")
    write_rows("data/oasst1/train.jsonl", [])
    write_everything()  # the same content as before
    Path("cache/sft/primer/val_idx.npy").unlink()
    Path("cache/pretrain/wikitext/train/shard_00000.bin").write_bytes(b"xx")
    states = table(succeed(*options))
    assert {name for name, state in states.items() if state == "built"} == {"roam", "primer", "wikitext"}
    states = table(succeed(*options, "--val-frac", 0.3))
    assert {name for name, state in states.items() if state == "built"} == {"dolly15k", "oasst1", "primer"}
    states = table(succeed(*options, "--val-frac", 0.3, "--fineweb-val-tokens", 60, "--gutenberg-train-tokens", 500))
    assert {name for name, state in states.items() if state == "built"} == {"fineweb_edu", "gutenberg"}


def test_build_all_without_the_hub(run, tokenizer):
    """Embedded sources are built; the others are reported at the end, each with its remedy."""
    code, out, err = run("build-all", tokenizer)
    assert code == 3
    states = {name: "built" if name in ("roam", "primer") else "failed" for name in (*PRETRAIN, *SFT)}
    assert table(out) == states | {"gutenberg": "not built"}
    *reasons, last = err.splitlines()
    assert last == "error: 4 of 7 caches could not be built; 2 available, 1 optional not built"
    assert len(reasons) == 5
    for (name, id_), line in zip(ON_HUB.items(), sorted(reasons, key=lambda s: list(ON_HUB).index(s.split(":")[0])),
                                 strict=True):  # fmt: skip
        assert line.startswith(f"{name}: {'not built' if name == 'gutenberg' else 'failed'}: ")
        assert id_ in line and "connect to the Hub" in line
        assert f"NIELS_GPT_DATA=FOLDER with FOLDER/{id_.rpartition('/')[2]}/" in line
    assert sorted(path.name for path in Path("cache").glob("*/*")) == sorted(
        ["spm.model", "meta.json", "roam", "gutenberg", "primer"]
    )
    assert CacheFolder("cache").names("pretrain") == ["roam"]
    assert meta_of(Path("cache/pretrain/gutenberg"))["built"] is False
    assert call("verify", "cache") == 0


def test_missing_optional_source_is_not_a_failure(everything, run, tokenizer):
    shutil.rmtree("data/gutenberg_clean_en_splits")
    code, out, err = run("build-all", tokenizer, *SMALL)
    assert code == 0
    assert table(out)["gutenberg"] == "not built"
    (line,) = err.splitlines()
    assert line.startswith("gutenberg: not built: ") and "NIELS_GPT_DATA" in line


def test_missing_optional_source_by_name_is_a_failure(everything, run, tokenizer):
    shutil.rmtree("data/gutenberg_clean_en_splits")
    code, out, err = run("build", "gutenberg", tokenizer)
    assert code == 1
    assert table(out) == {"gutenberg": "failed"}
    assert err.splitlines()[-1] == "error: 1 of 1 caches could not be built; 0 available"
    assert not Path("cache/pretrain/gutenberg").exists()


def test_cache_is_never_replaced_by_a_placeholder(everything, succeed, run, tokenizer):
    succeed("build-all", tokenizer, *SMALL)
    before = tree(Path("cache"))
    shutil.rmtree("data/gutenberg_clean_en_splits")
    shutil.rmtree("data/databricks-dolly-15k")
    code, out, err = run("build-all", tokenizer, *SMALL)
    assert code == 3
    assert table(out)["gutenberg"] == "up to date" and table(out)["dolly15k"] == "failed"
    assert [line.split(":")[0] for line in err.splitlines()] == ["gutenberg", "dolly15k", "error"]
    assert tree(Path("cache")) == before


def test_placeholder_has_no_local_path(everything, run, tokenizer, tmp_path):
    """Here the reason is a folder without files."""
    shutil.rmtree("data/gutenberg_clean_en_splits")
    write("data/gutenberg_clean_en_splits/readme.csv", "a,b")
    _, out, err = run("build-all", tokenizer, *SMALL)
    assert table(out)["gutenberg"] in ("not built", "failed")
    assert str(tmp_path / "data" / "gutenberg_clean_en_splits") in err  # printed, but not stored
    text = Path("cache/pretrain/gutenberg/meta.json").read_text(encoding="utf-8")
    assert str(tmp_path) not in text


@pytest.mark.parametrize("given", [True, False], ids=["with a tokenizer", "without one"])
def test_no_reachable_source(run, tokenizer, given):
    code, _, err = run("build-all", "--only", "fineweb_edu", *([tokenizer] if given else []))
    assert code == 1
    assert "HuggingFaceFW/fineweb-edu" in err and "NIELS_GPT_DATA" in err and "connect to the Hub" in err
    assert err.splitlines()[-1].startswith("error: ")
    assert not Path("cache/pretrain").exists()


def test_only_and_skip(everything, succeed, tokenizer):
    out = succeed("build-all", "--only", "primer", "--only", "roam", tokenizer)
    assert list(table(out)) == ["primer", "roam"]
    out = succeed("build-all", "--skip", "fineweb_edu", "--skip", "gutenberg", "--skip", "primer", tokenizer)
    assert list(table(out)) == ["roam", "wikitext", "dolly15k", "oasst1"]
    out = succeed("build-all", "--only", "oasst1", "--only", "roam", "--skip", "roam", "--only", "oasst1", tokenizer)
    assert list(table(out)) == ["oasst1"]
    assert not Path("cache/pretrain/gutenberg").exists()


def test_failing_source_does_not_stop_the_others(everything, run, tokenizer):
    write("data/wikitext/wikitext-103-raw-v1/train.jsonl", '{"text": "a"}\n{"text": \n')
    write(".roam-data/z.md", b"caf\xe9")
    code, out, err = run("build-all", tokenizer, *SMALL)
    assert code == 3
    assert {name for name, state in table(out).items() if state == "failed"} == {"wikitext", "roam"}
    wiki, roam = (next(line for line in err.splitlines() if line.startswith(f"{n}:")) for n in ("wikitext", "roam"))
    assert "train.jsonl" in wiki and "line 2" in wiki
    assert "z.md" in roam and "offset 3" in roam and "--encoding-errors replace" in roam
    code, out, _ = run("build-all", tokenizer, *SMALL, "--encoding-errors", "replace")
    assert table(out)["roam"] == "built" and table(out)["wikitext"] == "failed"


def test_json_output(everything, succeed, tokenizer):
    found = printed(succeed("build-all", tokenizer, *SMALL, "--config", "c.yaml", "--json"))
    assert list(found) == [*PRETRAIN, *SFT, "poems", "rows", "chats"]
    for name, entry in found.items():
        kind = "sft" if name in (*SFT, "chats") else "pretrain"
        folder = Path("cache") / kind / name
        assert (entry["state"], Path(entry["folder"]), entry["reason"]) == ("built", folder, "")
        unit = "examples" if kind == "sft" else "documents"
        for key in (f"{split}_{what}" for split in SPLITS for what in ("tokens", unit)):
            assert entry[key] == meta_of(folder)[key]
    again = printed(succeed("build-all", *SMALL, "--config", "c.yaml", "--json"))
    assert again == {name: entry | {"state": "up to date"} for name, entry in found.items()}


def test_missing_tokenizer_is_trained(everything, run):
    code, out, err = run("build-all", *SMALL, "--vocab-size", 350, "--seed", 5)
    assert code == 0, err
    first, *_ = out.splitlines()
    assert "350" in first and all(name in first for name in (*PRETRAIN, *SFT))
    folder = CacheFolder("cache")
    assert folder.tokenizer.vocab_size == meta_of(Path("cache/tokenizer"))["vocab_size"] <= 354
    assert meta_of(Path("cache/tokenizer"))["seed"] == 5
    assert folder.names("pretrain") == sorted(PRETRAIN) and folder.names("sft") == sorted(SFT)
    assert {meta_of(path.parent)["tokenizer_sha256"] for path in Path("cache").glob("[ps]*/*/meta.json")} == {
        folder.tokenizer.sha256
    }
    again, *_ = run("build-all", *SMALL, "--seed", 5)
    assert again == 0 and CacheFolder("cache").tokenizer.sha256 == folder.tokenizer.sha256


def test_tokenizer_trained_without_some_sources_warns(run):
    code, _, err = run("build-all", "--vocab-size", 400, "--tokenizer-documents", 3)
    assert code == 3
    (warning,) = [line for line in err.splitlines() if line.startswith("warning: ") and "tokenizer" in line]
    assert all(name in warning for name in ON_HUB) and "roam" not in warning and "primer" not in warning
    assert meta_of(Path("cache/tokenizer"))["inputs"]["texts"] == 3 + 3


def test_every_option_reaches_the_cache(everything, succeed, tokenizer, monkeypatch):
    """Every option with a value other than its default."""
    write_notes("notes")
    write("talk.txt", "user: a\nassistant: b")
    write_rows("data/pages/train.jsonl", as_rows(f"another page {i}" for i in range(99)))
    options = {
        "cache-dir": "other", "seed": 7, "shard-bytes": 64, "fineweb-id": "me/pages", "fineweb-config": "sample",
        "fineweb-train-tokens": 333, "fineweb-val-tokens": 33, "shuffle-buffer": 5, "gutenberg-train-tokens": 222,
        "gutenberg-val-tokens": 22, "wikitext-config": "wikitext-2-raw-v1", "roam": "notes", "primer": "talk.txt",
        "roam-val-frac": 0.5, "val-frac": 0.25, "workers": 3, "config": "c.yaml",
    }  # fmt: skip
    succeed("build-all", tokenizer, "--no-fineweb-streaming", *(f"--{name}={value}" for name, value in options.items()))
    assert not Path("cache").exists()
    metas = {path.parent.name: meta_of(path.parent) for path in Path("other").glob("[ps]*/*/meta.json")}
    assert len(metas) == 10
    assert {meta["seed"] for meta in metas.values()} == {7}
    assert {meta["shard_bytes"] for meta in metas.values() if meta["kind"] == "pretrain"} == {64}
    assert {meta["val_frac"] for meta in metas.values() if meta["kind"] == "sft"} == {0.25}
    web, books = metas["fineweb_edu"], metas["gutenberg"]
    assert (web["train_tokens"], web["val_tokens"], web["dataset_config"]) == (333, 33, "sample")
    assert web["streaming"] is False
    text = reference().decode(stream_of(Path("other/pretrain/fineweb_edu"), "train"))
    assert "another page" in text
    assert (books["train_tokens"], books["val_tokens"]) == (222, 22)
    assert metas["wikitext"]["dataset_config"] == "wikitext-2-raw-v1"
    assert len(documents_of(Path("other/pretrain/wikitext"), "val")) == 3
    paths = split_rule(sorted(str(path.absolute()) for path in Path("notes").rglob("*.md")), 0.5, 7)["val"]
    texts = [Path(path).read_bytes().decode().replace("\r\n", "\n") for path in paths]
    assert documents_of(Path("other/pretrain/roam"), "val") == [text for text in texts if text.strip()]
    assert (metas["primer"]["train_examples"], metas["primer"]["val_examples"]) == (1, 0)
    assert (
        documents_of(Path("other/pretrain/rows"), "val")
        == split_rule([f"row {i} of mine" for i in range(10)], 0.25, 7)["val"]
    )


def test_every_default_of_the_spec_is_an_option(run):
    code, out, _ = run("build-all", "--help")
    assert code == 0
    text = re.sub(r"-\s+(?=[A-Z0-9])", "-", " ".join(out.split()))  # help breaks lines at hyphens
    for flag, default in {
        "--cache-dir": "cache",
        "--seed": "42",
        "--shard-bytes": "134217728",
        "--fineweb-config": "CC-MAIN-2024-10",
        "--fineweb-train-tokens": "200000000",
        "--fineweb-val-tokens": "5000000",
        "--shuffle-buffer": "10000",
        "--vocab-size": "16000",
        "--val-frac": "0.1",
        "--roam-val-frac": "0.1",
        "--tokenizer-documents": None,
        "--gutenberg-train-tokens": None,
        "--gutenberg-val-tokens": None,
    }.items():
        found = re.search(rf" {flag}\b(?:(?! --[a-z]).)*?\[default: ([^\];]+)", text)
        assert found, flag
        assert default is None or found[1] == default, flag
    assert "--fineweb-streaming / --no-fineweb-streaming" in text and "[default: fineweb-streaming]" in text
    for flag in ("fineweb-id", "wikitext-config", "roam", "primer", "encoding-errors", "workers", "config", "offline",
                 "force", "json", "only", "skip", "tokenizer", "no-fineweb-streaming"):  # fmt: skip
        assert re.search(rf"--{flag}\b", text), flag


def test_help_names_the_commands(run):
    for arguments, entry in (((), "niels-gpt cache"), ((), "python -m niels_gpt.cache.cli")):
        _, out, _ = run(*arguments, "--help", entry=entry)
        assert all(f"\n  {command} " in out for command in ("build-all", "build", "verify", "inspect", "diff"))
        assert f"Usage: {entry} " in out


# --- build -------------------------------------------------------------------------------------------


def test_build_several_sources(everything, succeed, tokenizer):
    out = succeed("build", "dolly15k", "roam", "dolly15k", tokenizer, "--val-frac", 0.5)
    assert table(out) == {"dolly15k": "built", "roam": "built"}
    assert sorted(path.name for path in Path("cache").glob("[ps]*/*")) == ["dolly15k", "roam"]
    kept = [dolly_example(row) for row in DOLLY]
    check_sft(Path("cache/sft/dolly15k"), kept, tokenizer=reference(), val_frac=0.5, seed=42)
    paths = sorted(str(path.absolute()) for path in Path(".roam-data").rglob("*.md"))
    held_out = [Path(path).read_bytes().decode() for path in split_rule(paths, 0.5, 42)["val"]]
    wanted = [text.replace("\r\n", "\n") for text in held_out if text.strip()]
    assert documents_of(Path("cache/pretrain/roam"), "val") == wanted


def test_build_equals_build_all(everything, succeed, tokenizer):
    names = ("wikitext", "oasst1", "rows")
    only = [word for name in names for word in ("--only", name)]
    succeed("build-all", "--cache-dir", "all", tokenizer, "--config", "c.yaml", *only)
    for name in names:
        succeed("build", name, tokenizer, "--config", "c.yaml")
    assert tree(Path("cache")) == tree(Path("all"))


def test_build_from_a_path(succeed, tokenizer):
    write_rows("books.jsonl", as_rows(BOOKS))
    options = ["--path", "books.jsonl", "--train-tokens", 500, "--val-tokens", 40]
    succeed("build", "gutenberg", tokenizer, *options)
    wanted = by_budget(BOOKS, train=500, val=40)
    assert {split: stream_of(Path("cache/pretrain/gutenberg"), split) for split in SPLITS} == wanted


# --- another process, interrupts -----------------------------------------------------------------------------


def environment(tmp_path):
    kept = {name: value for name, value in os.environ.items() if name != "NIELS_GPT_DATA"}
    return {**kept, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}


def test_command_of_the_spec(succeed, tmp_path):
    command = [sys.executable, "-m", "niels_gpt.cache.cli", "build-all", "--cache-dir", "cache", "--seed", "42"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, encoding="utf-8")
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: 4 of 7 ")
    for name in ON_HUB:
        assert any(line.startswith(f"{name}: ") and "NIELS_GPT_DATA" in line for line in done.stderr.splitlines())
    folder = CacheFolder("cache")
    assert folder.names("pretrain") == ["roam"] and folder.names("sft") == ["primer"]
    assert 1000 < folder.tokenizer.vocab_size <= 16_004
    assert succeed("verify", "cache").count("\n") == 2


def test_interrupted_build_resumes(run, succeed, error, tokenizer, monkeypatch, caplog):
    for i in range(60):
        text = f"note {i}: " + "the model reads and writes again. " * (5 + i % 7) if i % 5 else " \n"
        write(f"notes/{i:02d}.md", text)
    options = ["build", "roam", "--path", "notes", tokenizer, "--shard-bytes", "256", "--workers", "2"]
    close, closed = ShardWriter.close_shard, []

    def interrupt(writer):
        closed.append(1)
        if len(closed) == 9:
            raise KeyboardInterrupt
        close(writer)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "close_shard", interrupt)
        code, out, err = run(*options)
    assert (code, out) == (130, "") and "interrupted" in err
    assert not Path("cache/pretrain/roam").exists()
    assert CacheFolder("cache").names("pretrain") == []
    assert "no cache" in error("verify", "cache")
    caplog.clear()
    assert table(succeed(*options)) == {"roam": "built"}
    assert "resuming" in caplog.text
    succeed(*options, "--cache-dir", "complete")
    assert digests(Path("cache")) == digests(Path("complete"))
    assert len(list(Path("cache/pretrain/roam/train").glob("shard_*.bin"))) > 12


# --- verify ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def caches(tokenizer, tmp_path_factory):
    """Caches of all sources; tests work on a copy."""
    with pytest.MonkeyPatch.context() as patch, no_waiting():
        patch.chdir(tmp_path_factory.mktemp("caches"))
        prepare_everything(patch)
        assert call("build-all", tokenizer, *SMALL) == 0
        return Path("cache").absolute()


@pytest.fixture
def cache(caches):
    return Path(shutil.copytree(caches, "cache"))


def test_verify(cache, succeed):
    lines = succeed("verify", "cache").splitlines()
    folders = [*(f"cache/pretrain/{name}" for name in sorted(PRETRAIN)), *(f"cache/sft/{name}" for name in sorted(SFT))]
    assert [line.split(":")[0] for line in lines] == folders
    for folder, line in zip(folders, lines, strict=True):
        assert f" {len(meta_of(Path(folder))['files'])} files" in line
    assert succeed("verify") == succeed("verify", "cache")
    assert json.loads(succeed("verify", "cache", "--json")) == folders
    assert succeed("verify", "cache/sft/primer").startswith("cache/sft/primer: 4 files")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        ("flipped", "pretrain/wikitext/val/shard_00000.bin"),
        ("missing", "sft/oasst1/train_tokens.bin"),
        ("extra", "sft/primer/val_tokens.bin"),
    ],
)
def test_verify_names_the_damaged_file(cache, error, damage, name):
    path = cache / name
    data = path.read_bytes()
    if damage == "flipped":
        path.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    elif damage == "missing":
        path.unlink()
    else:
        path = path.with_name("more_tokens.bin")
        path.write_bytes(b"ab")
    assert str(path) in error("verify", "cache")
    assert str(path) in error("verify", "cache", "--json")


@pytest.mark.parametrize("name", ["sft/oasst1/meta.json", "tokenizer/spm.model", "tokenizer/meta.json"])
def test_verify_names_a_damaged_meta_or_tokenizer(cache, error, name):
    path = cache / name
    path.write_bytes(path.read_bytes()[:-5])
    assert str(path) in error("verify", "cache")


# --- inspect -----------------------------------------------------------------------------------------


def tokens_of(folder, split):
    folder = Path(folder)
    return stream_of(folder, split) if folder.parent.name == "pretrain" else read_tokens(folder / f"{split}_tokens.bin")


def test_inspect_json(cache, succeed):
    for split, seed in (("train", 1), ("val", 2)):
        entries = json.loads(succeed("inspect", "cache", "--json", "--split", split, "--seed", seed, "--tokens", 7))
        assert [Path(entry["folder"]).name for entry in entries] == [*sorted(PRETRAIN), *sorted(SFT)]
        for entry in entries:
            stream = tokens_of(entry["folder"], split)
            assert entry["meta"] == meta_of(Path(entry["folder"]))
            assert entry["split"] == split
            if not stream:
                assert "text" not in entry
                continue
            assert entry["ids"] == stream[entry["token"] :][:7] and len(entry["ids"]) == min(7, len(stream))
            assert entry["text"] == decoded(entry["ids"])


def decoded(ids):
    """The text of ids, without the package; incomplete characters are U+FFFD."""
    sp, parts = reference().sp, []
    for i in ids:
        piece = sp.id_to_piece(i)
        parts.append(bytes([int(piece[3:5], 16)]) if sp.is_byte(i) else piece.replace("▁", " ").encode())
    return b"".join(parts).decode("utf-8", errors="replace")


def test_inspect_prints_meta_sizes_and_a_sample(cache, succeed):
    folder = Path("cache/pretrain/gutenberg")
    out = succeed("inspect", folder, "--seed", 3, "--tokens", 30)
    lines = out.splitlines()
    meta = meta_of(folder)
    assert lines[0] == str(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.suffix in (".bin", ".npy"))
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:] if line.strip()}
    assert shown["files"].startswith(f"{len(meta['files'])}, ")
    assert float(shown["files"].split()[1].removesuffix("kB")) == pytest.approx(size / 1000, rel=0.006)
    assert shown["dataset_name"] == "gutenberg" and shown["seed"] == "42"
    assert shown["train_tokens"] == "600" and shown["val_tokens"] == "100" and shown["max_val_tokens"] == "100"
    assert shown["tokenizer_sha256"].startswith(meta["tokenizer_sha256"][:12])
    assert shown["split_rule"].startswith(meta["split_rule"][:40])
    (at,) = [
        int(m[1].replace(",", "")) for m in map(re.compile(r"train, from token ([\d,]+) on:").fullmatch, lines) if m
    ]
    sample = out[out.index(" on:\n") + 5 :].removesuffix("\n")
    assert sample == decoded(stream_of(folder, "train")[at : at + 30]).replace(SPECIAL_TOKENS[3], "<eot>\n")


def test_inspect_in_a_narrow_terminal(cache, succeed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = "".join(succeed("inspect", "cache/pretrain/roam").split())
    meta = meta_of(cache / "pretrain" / "roam")
    assert meta["tokenizer_sha256"][:12] in out and meta["inputs"]["texts"]["sha256"][:12] in out
    assert "".join(meta["split_rule"].split()) in out
    assert f"train_tokens{meta['train_tokens']}" in out.replace(",", "")


def test_inspect_sample_depends_on_the_seed(cache, succeed):
    folder = "cache/pretrain/gutenberg"

    def start(*options):
        return json.loads(succeed("inspect", folder, "--json", "--tokens", 10, *options))[0]["token"]

    seeded = [start("--seed", seed) for seed in range(3)]
    assert len(set(seeded)) > 1
    assert [start("--seed", seed) for seed in range(3)] == seeded
    unseeded = {start() for _ in range(4)}
    assert len(unseeded) > 1 and all(0 <= token <= 590 for token in unseeded)


def test_inspect_sample_boundaries(cache, succeed):
    folder = "cache/sft/oasst1"
    total = len(tokens_of(folder, "train"))

    def start(seed, tokens):
        (entry,) = json.loads(succeed("inspect", folder, "--json", "--tokens", tokens, "--seed", seed))
        assert entry["ids"] == tokens_of(folder, "train")[entry["token"] :][:tokens]
        return entry["token"]

    assert {start(seed, total - 1) for seed in range(6)} == {0, 1}
    assert start(1, total) == start(1, 10 * total) == 0


def test_inspect_placeholder(run, succeed, tokenizer):
    run("build-all", tokenizer)
    out = succeed("inspect", "cache/pretrain/gutenberg")
    assert out.startswith("cache/pretrain/gutenberg\nnot built: ")
    (entry,) = json.loads(succeed("inspect", "cache/pretrain/gutenberg", "--json"))
    assert entry["meta"]["built"] is False and "text" not in entry


def test_inspect_prints_text_unchanged(succeed, tokenizer):
    """Without markup, emoji codes or added line breaks."""
    text = "[bold]not markup[/bold] :smile: [[link]] " + "a long line " * 40
    write("notes/a.md", text)
    succeed("build", "roam", "--path", "notes", tokenizer)
    assert text in succeed("inspect", "cache/pretrain/roam", "--tokens", 1000)


def test_inspect_with_another_or_no_tokenizer(cache, error, succeed, tokenizer, other_tokenizer):
    assert "another tokenizer" in error("inspect", "cache/sft/primer", other_tokenizer)
    (entry,) = json.loads(succeed("inspect", "cache/sft/primer", tokenizer, "--json", "--seed", 1))
    shutil.move("cache/sft/primer", "alone")
    assert "--tokenizer" in error("inspect", "alone")
    (again,) = json.loads(succeed("inspect", "alone", tokenizer, "--json", "--seed", 1))
    assert again["text"] == entry["text"]


def test_inspect_relative_paths(cache, succeed, monkeypatch):
    monkeypatch.chdir("cache/pretrain")
    assert json.loads(succeed("inspect", "roam", "--json"))[0]["text"]
    monkeypatch.chdir("roam")
    assert json.loads(succeed("inspect", ".", "--json"))[0]["text"]


# --- diff --------------------------------------------------------------------------------------------


@pytest.fixture
def two(everything, succeed, tokenizer):
    """A function that builds a source twice, the second time with other options; both folders."""

    def two(name, *options, first=tokenizer, second=tokenizer, change=lambda: None):
        succeed("build", name, first, "--cache-dir", "one")
        change()
        succeed("build", name, second, "--cache-dir", "two", *options)
        kind = "sft" if Path("one/sft").exists() else "pretrain"
        return Path("one", kind, name), Path("two", kind, name)

    return two


def test_diff_of_identical_caches(two, succeed):
    a, b = two("roam", "--workers", 3)
    assert succeed("diff", a, b) == f"{a} and {b} are identical\n"
    assert json.loads(succeed("diff", a, b, "--json")) == []


@pytest.mark.parametrize(
    ("name", "options", "cause"),
    [
        ("roam", ["--val-frac", 0.5], "val_frac: 0.1 and 0.5"),
        ("dolly15k", ["--seed", 7], "seed: 42 and 7"),
        (
            "wikitext",
            ["--subset", "wikitext-2-raw-v1"],
            "dataset_config: 'wikitext-103-raw-v1' and 'wikitext-2-raw-v1'",
        ),
    ],
)
def test_diff_names_the_setting(two, run, name, options, cause):
    a, b = two(name, *options)
    code, out, err = run("diff", a, b)
    assert (code, err) == (1, "")
    assert cause in out.splitlines()
    assert out.splitlines()[0] == cause
    code, out, _ = run("diff", a, b, "--json")
    assert code == 1 and cause in json.loads(out)


def test_diff_names_the_input_and_the_token(two, run):
    a, b = two("oasst1", change=lambda: swap("data/oasst1/train.jsonl", b"what is a step", b"what is a stop"))
    code, out, _ = run("diff", a, b)
    assert code == 1
    first, *rest = out.splitlines()
    assert first.startswith("input examples: 3 items") and rest
    for line in rest:
        name, at, x, y = re.fullmatch(
            r"(\w+_tokens\.bin): differ from token (\d+) on \((\d+) and (\d+)\)", line
        ).groups()
        mine, theirs = read_tokens(a / name), read_tokens(b / name)
        assert mine[: int(at)] == theirs[: int(at)]
        assert (mine[int(at)], theirs[int(at)]) == (int(x), int(y)) and x != y


# --- user errors ----------------------------------------------------------------------------------------


@pytest.fixture
def prepared(everything):
    write("latin/a.md", "a note")
    write("latin/b.md", b"caf\xe9")
    write("no.model", "no model")
    write("typo.yaml", "data: {sources: {mine: {paht: poems}}}")
    write("taken.yaml", "data: {sources: {dolly15k: {path: poems}}}")
    write("file", "x")
    Path("nothing").mkdir()


@pytest.mark.parametrize(
    ("options", "mentioned"),
    [
        ("build-all --only dolly", ["'dolly'", "dolly15k", "roam"]),
        ("build-all --skip dolly", ["'dolly'", "dolly15k"]),
        ("build-all --only roam --skip roam", ["--only", "--skip"]),
        ("build dolly", ["'dolly'", "dolly15k"]),
        ("build poems", ["'poems'"]),
        ("build roam dolly15k --path poems", ["--path"]),
        ("build roam --tokenizer nowhere", ["nowhere"]),
        ("build roam --tokenizer no.model", ["no.model"]),
        ("build poems --config none.yaml", ["none.yaml"]),
        ("build mine --config typo.yaml", ["data.sources.mine.paht"]),
        ("build-all --config taken.yaml", ["dolly15k", "already"]),
        ("verify nowhere", ["nowhere", "niels-gpt cache build-all"]),
        ("verify nothing", ["nothing"]),
        ("verify file", ["file"]),
        ("inspect nowhere", ["nowhere"]),
        ("inspect nothing --split dev", ["--split", "'dev'"]),
        ("diff nowhere nothing", ["nowhere"]),
    ],
)
def test_user_error_is_one_line(prepared, error, options, mentioned):
    message = error(*options.split())
    for part in mentioned:
        assert part in message


@pytest.mark.parametrize(
    ("options", "mentioned"),
    [
        ("roam --path nowhere", ["nowhere"]),
        ("roam --path latin", ["b.md", "offset 3", "--encoding-errors"]),
        ("roam --path latin --encoding-errors foo", ["foo", "replace"]),
        ("roam --shard-bytes 33", ["shard_bytes", "33"]),
        ("roam --shard-bytes 0", ["shard_bytes", "0"]),
        ("roam --val-frac 1.5", ["val_frac", "1.5"]),
        ("dolly15k --val-frac -0.5", ["val_frac", "-0.5"]),
        ("primer --path nowhere", ["nowhere"]),
        ("dolly15k --path file", ["file"]),
        ("gutenberg --val-tokens 1000000", ["train would be empty", "1000000"]),
        ("wikitext --subset wikitext-4", ["wikitext-4", "wikitext-2-raw-v1"]),
        ("roam --path nothing", ["roam", "empty"]),
        ("roam --seed 99999999999999999999", ["seed"]),
    ],
)
def test_source_that_cannot_be_built_prints_one_line(prepared, run, tokenizer, options, mentioned):
    code, _, err = run("build", *options.split(), tokenizer)
    assert code == 1
    lines = err.splitlines()
    assert lines[-1].startswith("error: ") and len(lines) <= 2
    for part in mentioned:
        assert part in err
    assert not list(Path("cache").glob("[ps]*/[a-z]*"))


@pytest.mark.parametrize(
    ("options", "mentioned"),
    [("--vocab-size 10", ["vocab_size", "10"]), ("--vocab-size 350 --cache-dir file", ["file"])],
)
def test_error_while_the_tokenizer_is_trained(prepared, run, options, mentioned):
    code, _, err = run("build", "primer", *options.split())
    assert code == 1
    *_, last = err.splitlines()
    assert last.startswith("error: ") and all(part in last for part in mentioned)
    assert not Path("cache").exists() or list(Path("cache").rglob("*.*")) == []


@pytest.mark.parametrize("folder", ["file", "file/below", "locked", "locked/below"])
def test_unusable_cache_dir_raises_before_training(prepared, error, monkeypatch, folder):
    Path("locked").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK and Path(path).name == "locked"))
    monkeypatch.setattr("niels_gpt.cache.sources.build.train_on", lambda *_: pytest.fail("a tokenizer was trained"))
    message = error("build-all", "--cache-dir", folder)
    assert folder in message and "choose another --cache-dir" in message


@pytest.mark.parametrize(
    ("command", "option", "value", "name"),
    [
        ("build-all", "--shard-bytes", 33, "shard_bytes"),
        ("build roam", "--val-frac", 2, "val_frac"),
        ("build-all", "--val-frac", "nan", "val_frac"),
        ("build-all", "--roam-val-frac", -1, "roam_val_frac"),
    ],
)
def test_invalid_numbers_raise_before_training(everything, error, command, option, value, name):
    message = error(*command.split(), option, value)
    assert name in message and str(value) in message
    assert not Path("cache").exists()


@pytest.mark.parametrize(
    ("command", "option", "remedy"),
    [
        ("build-all --only gutenberg", "--gutenberg-val-tokens=1000000", "a smaller --gutenberg-val-tokens"),
        ("build-all --only fineweb_edu", "--fineweb-val-tokens=1000000", "a smaller --fineweb-val-tokens"),
        ("build-all --only fineweb_edu", "--fineweb-train-tokens=0", "a larger --fineweb-train-tokens"),
        ("build gutenberg", "--val-tokens=1000000", "a smaller --val-tokens"),
    ],
)
def test_budget_that_leaves_train_empty_is_named_as_an_option(everything, run, tokenizer, command, option, remedy):
    code, _, err = run(*command.split(), option, tokenizer)
    assert code == 1
    assert "train would be empty" in err and remedy in err


# --- lost tokenizers ----------------------------------------------------------------


@pytest.fixture
def lost(everything, succeed, tokenizer):
    """Caches of roam and primer without their tokenizer; the sha256 of the tokenizer."""
    succeed("build", "roam", "primer", tokenizer)
    Path("cache/tokenizer/spm.model").rename("elsewhere.model")
    return meta_of(Path("cache/sft/primer"))["tokenizer_sha256"]


@pytest.mark.parametrize(
    ("command", "given"),
    [("build-all --only dolly15k", False), ("build dolly15k", True), ("build-all --only roam", True)],
)
def test_another_tokenizer_does_not_replace_a_lost_one(lost, error, other_tokenizer, command, given):
    before = tree(Path("cache"))
    message = error(*command.split(), *([other_tokenizer] if given else []))
    for part in ("tokenizer/spm.model", "sft/primer", lost[:12], "--tokenizer", "--cache-dir", "build all"):
        assert part in message
    assert ("pretrain/roam" in message) == ("roam" not in command)
    assert tree(Path("cache")) == before


def test_lost_tokenizer_can_be_restored(lost, succeed):
    succeed("build", "dolly15k", "--tokenizer=elsewhere.model")
    assert meta_of(Path("cache/sft/dolly15k"))["tokenizer_sha256"] == lost
    succeed("verify", "cache")


def test_all_caches_can_be_rebuilt_with_another_tokenizer(lost, succeed, other_tokenizer):
    succeed("build", "roam", "primer", other_tokenizer)
    assert meta_of(Path("cache/sft/primer"))["tokenizer_sha256"] != lost
    succeed("verify", "cache")


def test_placeholders_and_damaged_caches_need_no_tokenizer(everything, succeed, tokenizer):
    write("cache/pretrain/gutenberg/meta.json", '{"built": false}')
    write("cache/pretrain/fineweb_edu/meta.json", "[" * 100_000)
    succeed("build", "primer", tokenizer)


def test_another_tokenizer_for_the_same_folder(everything, succeed, error, tokenizer, other_tokenizer):
    succeed("build", "roam", tokenizer)
    before = tree(Path("cache"))
    message = error("build", "roam", other_tokenizer)
    assert "another tokenizer" in message and "--cache-dir" in message
    assert tree(Path("cache")) == before


def test_damaged_tokenizer_of_the_folder_is_named(everything, succeed, error, tokenizer):
    succeed("build", "roam", tokenizer)
    path = Path("cache/tokenizer/spm.model")
    path.write_bytes(path.read_bytes()[:500])
    for options in (["build", "dolly15k"], ["build", "dolly15k", tokenizer], ["inspect", "cache/pretrain/roam"]):
        assert str(path) in error(*options)


@pytest.mark.parametrize(
    "options",
    [
        "build",
        "build roam --train-tokens 0",
        "build-all roam",
        "build-all --seed -1",
        "build-all --workers 0",
        "build-all --fineweb-train-tokens -1",
        "build-all --shuffle-buffer 0",
        "inspect --tokens 0",
        "verify a b",
        "diff one",
        "buidl",
    ],
)
def test_usage(run, options):
    code, out, err = run(*options.split())
    assert (code, out) == (2, "")
    assert "Usage: niels-gpt cache" in err
