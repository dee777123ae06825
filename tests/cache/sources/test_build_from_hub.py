"""Caches built through the real `huggingface_hub`, `datasets` and fsspec from a local Hub server, with its faults."""

import gzip
import hashlib
import io
import json
import os
import random
import re
import signal

import pyarrow
import pyarrow.parquet
import pytest

from tests.cache.sources.inputs import BOOKS, DOLLY, LINES, OASST1
from tests.hub_client import HubClient
from tests.hub_server import Fault, HubServer

pytestmark = pytest.mark.slow

FINEWEB = "HuggingFaceFW/fineweb-edu"
SUBSET = "CC-MAIN-2024-10"
CARD = f"---\nconfigs:\n- config_name: {SUBSET}\n  data_files:\n  - split: train\n    path: data/{SUBSET}/*\n---\n"
PAGES = [
    {"text": f"page {i}: " + " ".join(f"w{i * j % 97}" for j in range(30)), "url": f"https://example.org/{i}"}
    for i in range(300)
]
OPTIONS = ["--train-tokens", "16000", "--val-tokens", "500", "--shuffle-buffer", "40", "--shard-bytes", "4096"]
DATA = r"GET .*/train-0000"
ORIGIN = {"source", "revision", "checksum"}
"""Fields of a meta.json that describe where the rows came from, and the checksum over all fields."""


def parquet(rows):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=50)
    return file.getvalue()


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


ENCODINGS = {"parquet": parquet, "jsonl": jsonl, "jsonl.gz": lambda rows: gzip.compress(jsonl(rows), mtime=0)}


def pages(extension, rows=PAGES):
    """The files of fineweb-edu: a third of the rows each."""
    third = len(rows) // 3
    return {
        f"data/{SUBSET}/train-0000{k}.{extension}": ENCODINGS[extension](rows[k * third : (k + 1) * third])
        for k in range(3)
    }


class Machine:
    """A Hub, and a machine that builds caches from it."""

    def __init__(self, hub, client):
        self.hub, self.client, self.folder = hub, client, client.folder
        self.tokenizer = None
        self.number = 0
        self.local = {}
        """(source, files) -> the cache of the same files on disk."""

    def build(self, source, *options, cache_dir=None, **client_options):
        """Run `cache build`; return its outcome, and the files of the cache (None: there is no cache)."""
        self.number += 1
        cache_dir = cache_dir or self.folder / f"cache-{self.number}"
        tokenizer = ["--tokenizer", self.tokenizer] if self.tokenizer else ["--vocab-size", "300"]
        outcome = self.client.run(
            "cache", "build", source, "--cache-dir", cache_dir, *tokenizer, *options, **client_options
        )
        self.tokenizer = self.tokenizer or cache_dir / "tokenizer" / "spm.model"
        kind = "sft" if source in ("dolly15k", "oasst1") else "pretrain"
        return outcome, cache_files(cache_dir / kind / source)

    def build_local(self, source, files, *options):
        """The cache of the same files on disk."""
        key = source, *sorted((path, hashlib.sha256(data).hexdigest()) for path, data in files.items())
        if key not in self.local:
            folder = self.folder / f"local-{self.number}"
            for path, data in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
            outcome, self.local[key] = self.build(source, "--path", folder, *options)
            assert outcome.status == 0, outcome.stderr
        return self.local[key]

    def publish(self, dataset_id, files, card=CARD):
        """Commit these files, and return the sha; no two commits are equal, so nothing of them is cached."""
        self.number += 1
        self.hub.requests.clear()
        self.hub.struck.clear()
        return self.hub.commit(dataset_id, {"README.md": f"{card}{self.number}\n".encode(), **files})


def cache_files(folder):
    """{path: content} of a cache; its meta is parsed, without the fields of ORIGIN."""
    if not folder.exists():
        return None
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    meta = json.loads(found["meta.json"])
    return found | {"meta.json": {key: value for key, value in meta.items() if key not in ORIGIN}}


def revision(cache_dir):
    return json.loads((cache_dir / "pretrain" / "fineweb_edu" / "meta.json").read_text(encoding="utf-8"))["revision"]


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    with HubServer() as hub, HubClient(hub.url, tmp_path_factory.mktemp("hub")) as client:
        machine = Machine(hub, client)
        machine.build_local("fineweb_edu", pages("parquet"), *OPTIONS)  # trains the tokenizer
        machine.local.clear()
        yield machine


@pytest.fixture
def machine(process):
    process.hub.faults = []
    yield process
    assert "Traceback" not in (process.folder / "stderr").read_text(encoding="utf-8")


# --- without faults ----------------------------------------------------------------------------------

WIKITEXT = "wikitext-103-raw-v1"
WIKITEXT_CARD = f"---\nconfigs:\n- config_name: {WIKITEXT}\n  data_files:\n" + "".join(
    f"  - split: {split}\n    path: {WIKITEXT}/{split}-*\n" for split in LINES
)


@pytest.mark.parametrize("extension", ENCODINGS)
def test_fineweb_edu_is_the_cache_of_the_local_files(machine, extension):
    files = pages(extension)
    sha = machine.publish(FINEWEB, files)
    cache_dir = machine.folder / f"plain-{extension}"
    outcome, found = machine.build("fineweb_edu", *OPTIONS, cache_dir=cache_dir)
    assert (outcome.status, outcome.stderr) == (0, "")
    assert len(found) > 8
    assert found == machine.build_local("fineweb_edu", files, *OPTIONS)
    assert revision(cache_dir) == sha


@pytest.mark.parametrize(
    ("source", "dataset_id", "files", "card"),
    [
        (
            "wikitext",
            "Salesforce/wikitext",
            {f"{WIKITEXT}/{s}-00000.parquet": parquet([{"text": line} for line in LINES[s]]) for s in LINES},
            WIKITEXT_CARD + "---\n",
        ),
        (
            "gutenberg",
            "nikolina-p/gutenberg_clean_en_splits",
            {f"data/train-0000{i}.parquet": parquet([{"text": book} for book in BOOKS[i::2]]) for i in range(2)},
            "",
        ),
        ("dolly15k", "databricks/databricks-dolly-15k", {"databricks-dolly-15k.jsonl": jsonl(DOLLY)}, ""),
        ("oasst1", "OpenAssistant/oasst1", {"data/train-00000.parquet": parquet(OASST1)}, ""),
    ],
)
def test_other_sources_are_the_cache_of_the_local_files(machine, source, dataset_id, files, card):
    machine.publish(dataset_id, files, card)
    machine.hub.faults = [
        Fault(r"GET .*(parquet|jsonl)", "cut"),
        Fault(r"GET .*(parquet|jsonl)", "short"),
        Fault("/tree/|/revision/", "status", status=500),
    ]
    machine.hub.moved = {"wikitext": "Salesforce/wikitext"}
    options = ["--val-tokens", "300"] if source == "gutenberg" else []
    outcome, found = machine.build(source, *options)
    assert outcome.status == 0, outcome.stderr
    assert len(machine.hub.struck) == 3
    assert found == machine.build_local(source, files, *options)
    if source == "gutenberg":  # streamed
        return
    # What was downloaded is read without the Hub.
    machine.hub.requests.clear()
    outcome, offline = machine.build(source, "--offline")
    assert (outcome.status, offline, machine.hub.requests) == (0, found, [])


@pytest.mark.parametrize("extension", ["parquet", "jsonl"])
def test_files_of_a_dataset_as_a_source_of_the_user(machine, extension):
    files = pages(extension)
    sha = machine.publish("niels/web", files)
    configs = []
    for path in (f"hf://datasets/niels/web@{sha}/data", machine.folder / f"web-{extension}"):
        configs.append(machine.folder / f"web-{len(configs)}-{extension}.yaml")
        configs[-1].write_text(f"data: {{sources: {{web: {{path: '{path}'}}}}}}\n", encoding="utf-8")
    for name, data in files.items():
        local = machine.folder / f"web-{extension}" / name.removeprefix("data/")
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(data)
    machine.hub.faults = [Fault(DATA, "short")]
    remote, local = (machine.build("web", "--config", config, "--shard-bytes", "4096") for config in configs)
    assert remote[0].status == 0, remote[0].stderr
    assert len(machine.hub.struck) == 1
    assert remote[1] == local[1]
    assert remote[1] is not None


@pytest.mark.parametrize("kind", ["cut", "short"])
def test_a_file_of_several_ranges(machine, kind):
    """`huggingface_hub` reads ranges of 5 MiB."""
    draw = random.Random(0)
    files = {f"data/{SUBSET}/train-00000.parquet": parquet([{"text": draw.randbytes(3000).hex()} for _ in range(1200)])}
    machine.publish(FINEWEB, files)
    machine.hub.faults = [Fault(DATA, kind, skip=3)]  # the first two read the revision
    outcome, found = machine.build("fineweb_edu", *OPTIONS)
    assert outcome.status == 0, outcome.stderr
    assert found == machine.build_local("fineweb_edu", files, *OPTIONS)
    assert len({request for request in machine.hub.requests if "bytes=" in request}) >= 2
    assert len(machine.hub.struck) == 1


# --- faults that pass --------------------------------------------------------------------------------

LATER = 4
"""The fifth request for data is one of the build itself."""
LIMITED = {"status": 429, "headers": {"Retry-After": "7"}}
PASSING = {
    "429, data": [Fault(DATA, "status", skip=LATER, times=2, **LIMITED)],
    "429, tree": [Fault("/tree/", "status", times=2, **LIMITED)],
    "429, info": [Fault("/revision/", "status", times=2, **LIMITED)],
    "429, card": [Fault("README", "status", times=2, **LIMITED)],
    "500, data": [Fault(DATA, "status", status=500, skip=LATER, times=3)],
    "503, data, longer than one attempt": [Fault(DATA, "status", status=503, skip=LATER, times=7)],
    "504, tree": [Fault("/tree/", "status", status=504, times=7)],
    "cut": [Fault(DATA, "cut", skip=LATER, times=2)],
    "cut, longer than one attempt": [Fault(DATA, "cut", skip=LATER, times=9)],
    "cut, tree": [Fault("/tree/", "cut")],
    "truncated": [Fault(DATA, "short", skip=LATER)],
    "truncated, longer than one attempt": [Fault(DATA, "short", skip=LATER, times=5)],
    "empty": [Fault(DATA, "short", fraction=0.0, skip=LATER)],
    "one byte less": [Fault(DATA, "short", fraction=0.9999, skip=LATER)],
    "Content-Length too large": [Fault(DATA, "long", skip=LATER, times=2)],
    "truncated card": [Fault("GET .*README", "short")],
    "slow": [Fault(DATA, "slow", skip=LATER, times=2, pause=0.02)],
    "stalled": [Fault(DATA, "slow", skip=LATER, pause=5.0)],
}


@pytest.mark.parametrize(
    ("fault", "extension"),
    [*((fault, "jsonl") for fault in PASSING), ("500, data", "parquet"), ("cut", "parquet"), ("truncated", "parquet")],
)
def test_a_fault_that_passes_changes_no_byte(machine, fault, extension):
    files = pages(extension)
    machine.publish(FINEWEB, files)
    machine.hub.faults = [Fault(**vars(one)) for one in PASSING[fault]]
    times = sum(one.times for one in PASSING[fault])
    outcome, found = machine.build("fineweb_edu", *OPTIONS, download_timeout=1 if fault == "stalled" else 60)
    assert outcome.status == 0, outcome.stderr
    assert found == machine.build_local("fineweb_edu", files, *OPTIONS)
    assert len(machine.hub.struck) == times
    if fault in ("429, data", "429, tree"):
        assert outcome.pauses == [8.0, 8.0]  # Retry-After, and a second by huggingface_hub


# --- faults that stay --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extension", "fault", "facts"),
    [
        ("parquet", Fault(DATA, "status", status=503, skip=LATER, times=-1), ["503 Service Unavailable", "try again"]),
        ("jsonl", Fault(DATA, "status", skip=LATER, times=-1, **LIMITED), ["429 Too Many Requests", "limits the rate"]),
        ("parquet", Fault(DATA, "status", status=404, skip=LATER, times=-1), ["404 Not Found", "train-0000"]),
        ("jsonl", Fault(DATA, "status", status=403, skip=LATER, times=-1), ["403 Forbidden", "hf auth login"]),
        ("parquet", Fault(DATA, "cut", skip=LATER, times=-1), ["train-0000|reset|closed|peer", "try again"]),
        ("jsonl", Fault(DATA, "short", skip=LATER, times=-1), ["the Hub sent", "train-0000", "try again"]),
        ("parquet", Fault(DATA, "short", fraction=0.0, skip=LATER, times=-1), ["the Hub sent 0 bytes", "train-0000"]),
        ("jsonl", Fault("/tree/", "status", status=500, times=-1), ["500 Internal Server Error", "try again"]),
    ],
)
def test_a_fault_that_stays_is_one_line_and_no_cache(machine, extension, fault, facts):
    machine.publish(FINEWEB, pages(extension))
    machine.hub.faults = [Fault(**vars(fault))]
    outcome, found = machine.build("fineweb_edu", *OPTIONS)
    assert outcome.status == 1
    assert found is None
    lines = [line for line in outcome.stderr.splitlines() if line.startswith("fineweb_edu: failed: ")]
    assert len(lines) == 1
    assert FINEWEB in lines[0] and not re.search(r"\w\.\. ", lines[0])
    for fact in facts:
        assert any(word in lines[0] for word in fact.split("|")), (fact, lines[0])
    assert sum(outcome.pauses) < 15 * 60

    # When the Hub works again, the same command builds the same cache.
    machine.hub.faults = []
    cache_dir = machine.folder / f"cache-{machine.number}"
    outcome, found = machine.build("fineweb_edu", *OPTIONS, cache_dir=cache_dir)
    assert outcome.status == 0, outcome.stderr
    assert found == machine.build_local("fineweb_edu", pages(extension), *OPTIONS)


# --- revisions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [False, True], ids=["", "the stream breaks too"])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_commit_during_a_build_does_not_mix_two_revisions(machine, at, broken):
    files = pages("jsonl")
    sha = machine.publish(FINEWEB, files)

    def push():
        machine.hub.commit(FINEWEB, {"README.md": CARD.encode(), **pages("jsonl", PAGES[::-1])})

    machine.hub.faults = [Fault(DATA, "call", skip=at, action=push)]
    if broken:  # longer than huggingface_hub retries: the dataset is opened again
        machine.hub.faults.append(Fault(DATA, "status", skip=LATER, times=7))
    cache_dir = machine.folder / f"pushed-{at}-{broken}"
    outcome, found = machine.build("fineweb_edu", *OPTIONS, cache_dir=cache_dir)
    assert outcome.status == 0, outcome.stderr
    assert found == machine.build_local("fineweb_edu", files, *OPTIONS)
    assert revision(cache_dir) == sha


def test_a_commit_that_was_removed_is_an_error(machine):
    machine.publish(FINEWEB, pages("jsonl"))

    def rewrite():
        machine.hub.repositories[FINEWEB].clear()
        machine.publish(FINEWEB, pages("jsonl", PAGES[::-1]))

    machine.hub.faults = [Fault(DATA, "call", skip=LATER, action=rewrite), Fault(DATA, "status", skip=LATER, times=7)]
    outcome, found = machine.build("fineweb_edu", *OPTIONS)
    assert outcome.status == 1 and found is None
    assert "changed on the Hub" in outcome.stderr or "404" in outcome.stderr


# --- kills -------------------------------------------------------------------------------------------


LONG_PAGES = [page | {"text": page["text"] * 40} for page in PAGES]
LONG_OPTIONS = ["--train-tokens", "400000", "--val-tokens", "500", "--shuffle-buffer", "40", "--shard-bytes", "65536"]
LONG_OPTIONS += ["--threads", "1"]
"""Enough to fill shards before the last file is read."""


@pytest.mark.parametrize(("at", "extension"), [(0, "jsonl"), (4, "jsonl"), (5, "jsonl"), (5, "parquet")])
def test_a_build_killed_at_any_request_resumes_to_the_same_cache(machine, at, extension):
    files = pages(extension, LONG_PAGES)
    machine.publish(FINEWEB, files)
    machine.hub.faults = [
        Fault(DATA, "call", skip=at, action=lambda: os.kill(machine.client.pid, signal.SIGKILL)),
    ]
    cache_dir = machine.folder / f"killed-{at}-{extension}"
    outcome, found = machine.build("fineweb_edu", *LONG_OPTIONS, cache_dir=cache_dir)
    assert outcome.status == -signal.SIGKILL
    assert found is None
    assert (cache_dir / "pretrain" / ".fineweb_edu.partial" / "state.json").exists() == (at == 5)
    machine.hub.faults = [Fault(DATA, "cut", skip=LATER)]
    outcome, found = machine.build("fineweb_edu", *LONG_OPTIONS, cache_dir=cache_dir)
    assert outcome.status == 0, outcome.stderr
    assert found == machine.build_local("fineweb_edu", files, *LONG_OPTIONS)
    assert sorted(path.name for path in (cache_dir / "pretrain").iterdir()) == ["fineweb_edu"]


def test_a_build_killed_during_a_commit_starts_again_with_the_new_rows(machine):
    machine.publish(FINEWEB, pages("jsonl"))
    machine.hub.faults = [Fault(DATA, "call", skip=5, action=lambda: os.kill(machine.client.pid, signal.SIGKILL))]
    cache_dir = machine.folder / "killed-and-pushed"
    assert machine.build("fineweb_edu", *OPTIONS, cache_dir=cache_dir)[0].status == -signal.SIGKILL
    files = pages("jsonl", PAGES[::-1])
    sha = machine.publish(FINEWEB, files)
    machine.hub.faults = []
    outcome, found = machine.build("fineweb_edu", *OPTIONS, cache_dir=cache_dir)
    assert outcome.status == 0, outcome.stderr
    assert found == machine.build_local("fineweb_edu", files, *OPTIONS)
    assert revision(cache_dir) == sha
