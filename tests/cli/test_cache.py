import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from niels_gpt.cache.folder import CacheFolder
from niels_gpt.cache.sources import build as build_module
from niels_gpt.cache.sources.texts import BuildSettings
from niels_gpt.cache.writing.shards import ShardWriter
from niels_gpt.cli import cache as cache_cli
from niels_gpt.cli import main as full_cli
from niels_gpt.data.registry import sources
from niels_gpt.tokenizer import SPECIAL_TOKENS, train_tokenizer
from tests.cache import SPLITS, digests, meta_of, read_tokens, real_tokenizer, split_rule, stream_of, tree
from tests.cache.sources.inputs import (
    BOOKS,
    DIALOGUES,
    PAGES,
    as_rows,
    by_budget,
    documents_of,
    messages,
    reference,
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
    """An empty working directory and a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("NIELS_GPT_DATA", "NIELS_GPT_DEBUG"):
        monkeypatch.delenv(name, raising=False)


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
                full_cli.main(["research" if words[0] in ("inspect", "diff") else "cache", *words])
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
    """{cache: state} of the table of a build, which follows the lines about what was read and skipped."""
    lines = [line for line in out.splitlines() if line.strip()]
    head, *rows = itertools.dropwhile(lambda line: re.match(r"\S+: ", line), lines)
    assert head.split()[0] == "cache"
    return {row.split()[0]: re.match(r"\S+ +(built|up to date|failed|not built)\b", row)[1] for row in rows}


def printed(out):
    """{cache: entry} of the JSON output of a build."""
    return {entry["name"]: entry for entry in json.loads(out)}


# --- build-all ---------------------------------------------------------------------------------------


def test_build_all(everything, succeed, tokenizer, caches):
    entry = "python -m niels_gpt.cache.cli"
    split = "--notes-split=shared_text"  # the specified command splits by file
    out = succeed(
        "build-all", "--cache-dir", "cache", "--seed", 42, "--workers", 4, tokenizer, split, *SMALL, entry=entry
    )
    assert (Path("cache/notes.json").stat().st_mode & 0o777) == 0o600
    built, other = digests(Path("cache")), digests(caches)  # built by niels-gpt cache build-all
    for found in (built, other):
        del found["notes.json"]  # the record of a run that is resumed: it has the path of the notes
    assert built == other
    assert table(out) == dict.fromkeys((*PRETRAIN, *SFT), "built")
    names = {str(path.relative_to("cache")) for path in Path("cache").rglob("*")}
    wanted = {
        "tokenizer",
        "tokenizer/spm.model",
        "tokenizer/meta.json",
        "pretrain",
        "sft",
        "skipped.json",
        "notes.json",
    }
    for name in PRETRAIN:
        wanted |= {f"pretrain/{name}", f"pretrain/{name}/meta.json"}
        for split in SPLITS:
            shards = -(-meta_of(Path("cache/pretrain") / name)[f"{split}_tokens"] * 2 // 256)
            wanted |= {f"pretrain/{name}/{split}"}
            wanted |= {f"pretrain/{name}/{split}/{file}" for file in ("documents.npy", "checksums.npy")}
            wanted |= {f"pretrain/{name}/{split}/shard_{i:05d}.bin" for i in range(shards)}
    for name in SFT:
        wanted |= {f"sft/{name}", f"sft/{name}/meta.json"}
        wanted |= {
            f"sft/{name}/{split}_{file}" for split in SPLITS for file in ("tokens.bin", "idx.npy", "checksums.npy")
        }
    assert names == wanted


def test_build_all_without_the_hub(run, succeed, tokenizer):
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
    names = {path.name for path in Path("cache").glob("*/*")}
    assert names == {"spm.model", "meta.json", "roam", "gutenberg", "primer"}
    assert CacheFolder("cache").names("pretrain") == ["roam"]
    assert meta_of(Path("cache/pretrain/gutenberg"))["built"] is False
    assert call("verify", "cache") == 0
    assert succeed("inspect", "cache/pretrain/gutenberg").startswith("cache/pretrain/gutenberg\nnot built: ")
    (entry,) = json.loads(succeed("inspect", "cache/pretrain/gutenberg", "--json"))
    assert entry["meta"]["built"] is False and "text" not in entry


def test_missing_optional_source_is_not_a_failure(everything, run, tokenizer, tmp_path):
    shutil.rmtree("data/gutenberg_clean_en_splits")
    code, out, err = run("build-all", tokenizer, *SMALL)
    assert code == 0
    assert table(out)["gutenberg"] == "not built"
    (line,) = err.splitlines()
    assert line.startswith("gutenberg: not built: ") and "NIELS_GPT_DATA" in line
    shutil.rmtree("cache/pretrain/gutenberg")
    write("data/gutenberg_clean_en_splits/readme.csv", "a,b")  # a folder without files of rows
    _, _, err = run("build-all", "--only", "gutenberg", tokenizer)
    folder = str(tmp_path / "data" / "gutenberg_clean_en_splits")
    assert folder in err and folder not in Path("cache/pretrain/gutenberg/meta.json").read_text(encoding="utf-8")


def test_missing_optional_source_by_name_is_a_failure(run, tokenizer):
    code, out, err = run("build", "gutenberg", tokenizer)
    assert code == 1 and table(out) == {"gutenberg": "failed"}
    assert err.splitlines()[-1] == "error: 1 of 1 caches could not be built; 0 available"
    assert not Path("cache/pretrain/gutenberg").exists()


@pytest.mark.parametrize("given", [True, False], ids=["with a tokenizer", "without one"])
def test_no_reachable_source(run, tokenizer, given):
    code, _, err = run("build-all", "--only", "fineweb_edu", *([tokenizer] if given else []))
    assert code == 1
    assert "HuggingFaceFW/fineweb-edu" in err and "NIELS_GPT_DATA" in err and "connect to the Hub" in err
    assert err.splitlines()[-1].startswith("error: ")
    assert not Path("cache/pretrain").exists()


def test_only_and_skip(everything, succeed, tokenizer):
    out = succeed("build-all", "--only", "primer", "--only", "roam", "--only", "oasst1", "--skip", "roam", tokenizer)
    assert list(table(out)) == ["primer", "oasst1"]
    assert not Path("cache/pretrain").exists()


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
    write("replace.yaml", "data: {encoding_errors: replace}")
    code, out, _ = run("build-all", "--only", "roam", tokenizer, *SMALL, "--config", "replace.yaml")
    assert code == 0 and table(out)["roam"] == "up to date"


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
    again = printed(succeed("build-all", *SMALL, "--config", "c.yaml", "--json"))  # with the tokenizer of the folder
    assert again == {name: entry | {"state": "up to date"} for name, entry in found.items()}
    assert printed(succeed("build-all", *SMALL, "--only", "roam", "--force", "--json")) == {"roam": found["roam"]}


def test_missing_tokenizer_is_trained(everything, run):
    code, out, err = run("build-all", *SMALL, "--vocab-size", 350, "--seed", 5)
    assert code == 0, err
    first, *_ = out.splitlines()
    assert "350" in first and all(name in first for name in (*PRETRAIN, *SFT))
    folder = CacheFolder("cache")
    assert folder.tokenizer.vocab_size == meta_of(Path("cache/tokenizer"))["vocab_size"] <= 354
    assert meta_of(Path("cache/tokenizer"))["seed"] == 5
    assert folder.names("pretrain") == sorted(PRETRAIN) and folder.names("sft") == sorted(SFT)
    metas = [meta_of(path.parent) for path in Path("cache").glob("[ps]*/*/meta.json")]
    assert {meta["tokenizer_sha256"] for meta in metas} == {folder.tokenizer.sha256}
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
    rows = split_rule([f"row {i} of mine" for i in range(10)], 0.25, 7)["val"]
    assert documents_of(Path("other/pretrain/rows"), "val") == rows


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
        "--notes-val-frac": "0.1",
        "--tokenizer-documents": None,
        "--gutenberg-train-tokens": None,
        "--gutenberg-val-tokens": None,
    }.items():
        found = re.search(rf" {flag}\b(?:(?! --[a-z]).)*?\[default: ([^\];]+)", text)
        assert found, flag
        assert default is None or found[1] == default, flag
    assert "--fineweb-streaming / --no-fineweb-streaming" in text and "[default: fineweb-streaming]" in text


# --- build -------------------------------------------------------------------------------------------


def test_build_from_a_path(succeed, tokenizer):
    write_rows("books.jsonl", as_rows(BOOKS))
    options = ["--path", "books.jsonl", "--train-tokens", 500, "--val-tokens", 40]
    succeed("build", "gutenberg", tokenizer, *options)
    assert [path.name for path in Path("cache").glob("[ps]*/*")] == ["gutenberg"]
    wanted = by_budget(BOOKS, train=500, val=40)
    assert {split: stream_of(Path("cache/pretrain/gutenberg"), split) for split in SPLITS} == wanted


# --- another process, interrupts -----------------------------------------------------------------------------


def test_command_of_the_spec(succeed, tmp_path):
    command = [sys.executable, "-m", "niels_gpt.cache.cli", "build-all", "--cache-dir", "cache", "--seed", "42"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.splitlines()[-1].startswith("error: 4 of 7 ")
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
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("caches"))
        prepare_everything(patch)
        assert call("build-all", "--workers", 1, tokenizer, *SMALL) == 0
        return Path("cache").absolute()


@pytest.fixture
def cache(caches):
    return Path(shutil.copytree(caches, "cache"))


def test_verify(cache, succeed, error):
    lines = succeed("verify", "cache").splitlines()
    folders = [*(f"cache/pretrain/{name}" for name in sorted(PRETRAIN)), *(f"cache/sft/{name}" for name in sorted(SFT))]
    assert [line.split(":")[0] for line in lines] == folders
    for folder, line in zip(folders, lines, strict=True):
        assert f" {len(meta_of(Path(folder))['files'])} files" in line
    assert succeed("verify") == succeed("verify", "cache")
    assert json.loads(succeed("verify", "cache", "--json")) == folders
    assert succeed("verify", "cache/sft/primer").startswith("cache/sft/primer: 6 files")
    path = cache / "pretrain" / "wikitext" / "val" / "shard_00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    for options in ([], ["--json"]):
        assert str(path) in error("verify", "cache", *options)


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
            assert entry["text"] == reference().decode(entry["ids"])


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
    assert sample == reference().decode(stream_of(folder, "train")[at : at + 30]).replace(SPECIAL_TOKENS[3], "<eot>\n")


def test_inspect_a_damaged_list_of_files(cache, error):
    path = cache / "sft" / "primer" / "meta.json"
    path.write_text(json.dumps({**meta_of(path.parent), "files": ["train_tokens.bin"]}), encoding="utf-8")
    assert "cache/sft/primer/meta.json is damaged (field files)" in error("inspect", "cache/sft/primer")


def test_inspect_sample_depends_on_the_seed(cache, succeed, monkeypatch):
    monkeypatch.chdir("cache/pretrain/gutenberg")

    def start(*options):
        return json.loads(succeed("inspect", ".", "--json", "--tokens", 10, *options))[0]["token"]

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


# --- diff --------------------------------------------------------------------------------------------


def test_diff(everything, succeed, run, tokenizer):
    for folder, *options in (["a"], ["b", "--workers", 3], ["c", "--subset", "wikitext-2-raw-v1"]):
        succeed("build", "wikitext", tokenizer, "--cache-dir", folder, *options)
    a, b, c = (Path(folder, "pretrain/wikitext") for folder in "abc")
    assert succeed("diff", a, b) == f"{a} and {b} are identical\n"
    assert json.loads(succeed("diff", a, b, "--json")) == []
    cause = "dataset_config: 'wikitext-103-raw-v1' and 'wikitext-2-raw-v1'"
    code, out, err = run("diff", a, c)
    assert (code, err) == (1, "") and out.splitlines()[0] == cause
    code, out, _ = run("diff", a, c, "--json")
    assert code == 1 and cause in json.loads(out)


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
        ("build-all --only roam --skip roam", ["--only", "--skip"]),
        ("build dolly", ["'dolly'", "dolly15k"]),
        ("build roam dolly15k --path poems", ["--path"]),
        ("build roam --test", ["--test", "wikitext"]),
        ("build dolly15k roam --subset train", ["--subset", "wikitext", "dolly15k, roam"]),
        ("build roam --train-tokens 5", ["--train-tokens", "fineweb_edu and gutenberg", "roam"]),
        ("build wikitext --val-tokens 0", ["--val-tokens", "fineweb_edu and gutenberg", "wikitext"]),
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
        ("primer --path nowhere", ["nowhere"]),
        ("dolly15k --path file", ["file"]),
        ("wikitext --subset wikitext-4", ["wikitext-4", "wikitext-2-raw-v1"]),
        ("roam --path nothing", ["roam", "nothing"]),
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


@pytest.mark.parametrize("folder", ["file/below", "locked"])
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


def test_another_tokenizer_does_not_replace_a_lost_one(lost, error, other_tokenizer):
    before = tree(Path("cache"))
    for options in (["build-all", "--only", "dolly15k"], ["build", "dolly15k", other_tokenizer]):
        message = error(*options)
        for part in ("tokenizer/spm.model", "sft/primer", lost[:12], "--tokenizer", "--cache-dir", "build all"):
            assert part in message
    assert tree(Path("cache")) == before


def test_lost_tokenizer_can_be_restored_or_all_caches_rebuilt(lost, succeed, error, other_tokenizer):
    succeed("build", "dolly15k", "--tokenizer=elsewhere.model")
    assert meta_of(Path("cache/sft/dolly15k"))["tokenizer_sha256"] == lost
    succeed("verify", "cache")
    before = tree(Path("cache"))
    message = error("build", "roam", other_tokenizer)
    assert "another tokenizer" in message and "--cache-dir" in message
    assert tree(Path("cache")) == before
    Path("cache/tokenizer/spm.model").unlink()
    succeed("build", "roam", "primer", "dolly15k", other_tokenizer)
    assert meta_of(Path("cache/sft/primer"))["tokenizer_sha256"] != lost
    succeed("verify", "cache")


@pytest.mark.parametrize("given", [True, False], ids=["--tokenizer", "of the folder"])
def test_another_vocab_size_than_that_of_the_tokenizer(run, succeed, tokenizer, tmp_path, given):
    """It is refused with both numbers; the size that was asked for, or that the tokenizer has, is fine."""
    has = real_tokenizer().vocab_size - len(SPECIAL_TOKENS)
    if not given:
        succeed("build", "primer", tokenizer)
    options = [tokenizer] if given else []
    code, _, err = run("build", "primer", *options, "--vocab-size", 4321)
    assert code == 1 and "4,321" in err and f"{has:,}" in err
    succeed("build", "primer", *options, "--vocab-size", has)


def test_a_meta_without_totals_is_a_clear_error(run, succeed, tokenizer):
    succeed("build", "primer", tokenizer)
    path = Path("cache/sft/primer/meta.json")
    meta = meta_of(path.parent)
    del meta["train_tokens"]
    path.write_text(json.dumps(meta), encoding="utf-8")
    for command in ("inspect", "verify"):
        code, _, err = run(command, "cache/sft/primer")
        assert code == 1 and "train_tokens" in err and "build the cache again" in err


def test_builds_into_one_new_folder_train_one_tokenizer(tmp_path, monkeypatch):
    """The second waits for the first, and uses its tokenizer."""
    write_notes(tmp_path / "notes")
    settings = BuildSettings(cache_dir=tmp_path / "cache", vocab_size=300, roam=tmp_path / "notes")
    train_on, trainings = build_module.train_on, []

    def slow_training(*arguments, **options):
        trainings.append(threading.get_ident())
        time.sleep(0.3)
        return train_on(*arguments, **options)

    monkeypatch.setattr(build_module, "train_on", slow_training)
    chosen = [sources()["roam"]]
    with ThreadPoolExecutor(2) as pool:
        console = Console(file=io.StringIO())
        jobs = [pool.submit(cache_cli._prepare_tokenizer, settings, None, chosen, {}, console) for _ in range(2)]
        assert len({job.result().sha256 for job in jobs}) == 1
    assert len(trainings) == 1
