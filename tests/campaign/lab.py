"""The folder in which cases run: small texts, caches, runs and reports, and the commands that make and read them.

A run stores absolute paths, so a lab is always at the same path: `reset` restores it from a pristine copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.campaign import shim
from tests.campaign.processes import Outcome, Running, command_line, import_modules
from tests.campaign.verdicts import Verdict, failed, fell_back, has_other_tokenizer, refused, reports_a_problem, unclear
from tests.ports import free_ports

CONFIG = """\
model: {T: 32, C: 16, L: 1, H: 2, dropout: 0.1}
train:
  {B: 4, seed: 7, total_steps: 6, warmup_steps: 2, p_train: {roam: 0.6, primer: 0.4}, p_val: {roam: 0.5, primer: 0.5}}
data:
  roam: notes
  primer: primer.txt
  cache_dir: streams
  sources: {web: {path: web.jsonl}, talk: {path: chats.jsonl}, table: {path: web.parquet}}
output: {checkpoint_every: 2, eval_every: 2, eval_steps: 1, sample_every: 0, sample_tokens: 4}
"""
PIPELINE = """\
data: {token_cache: cache}
pretrain:
  model: {T: 32, C: 16, L: 1, H: 2, dropout: 0.0}
  train: {total_steps: 4, warmup_steps: 1, B: 4, p_train: {roam: 0.5, web: 0.5}}
  output: {checkpoint_every: 2, eval_every: 2, eval_steps: 1, sample_tokens: 2, sample_every: 0}
sft:
  train: {total_steps: 4, warmup_steps: 1, B: 4, p_train: {talk: 0.5, primer: 0.5}}
  output: {checkpoint_every: 2, eval_every: 2, eval_steps: 1, sample_tokens: 2, sample_every: 0}
"""
QUESTIONS = '{"topic": "notes", "question": "what is a note?", "words": ["note", "text"]}\n'
TOKENS = (
    "--set", "task=pretrain", "--set", "train.p_train={roam: 0.5, web: 0.5}", "--set",
    "train.p_val={roam: 0.5, web: 0.5}",
)  # fmt: skip
SFT = (
    "--set", "task=sft", "--set", "train.p_train={talk: 0.5, primer: 0.5}", "--set",
    "train.p_val={talk: 0.5, primer: 0.5}", "--set", "data.retain={roam: 1.0}",
    "--set", "init_from=runs/tokens/checkpoints/best.pt", "--set", "model.V=304",
)  # fmt: skip
SPLICE = ("--set", "task=splice", "--set", "splice.dataset_name=roam", "--set", "splice.num_docs=2")
BUILD = ("--config", "c.yaml", "--vocab-size", "300", "--threads", "1", "--offline", "--quiet")


class Command(NamedTuple):
    """A command of the lab."""

    words: tuple[str, ...]
    makes: tuple[str, ...] = ()
    """What it makes: removed before it runs as a disturbed writer. Empty: a reader."""
    again: tuple[str, ...] = ()
    """The command after an interruption; default: the same."""
    environment: tuple[tuple[str, str], ...] = ()


def _train(run: str, *options: str) -> Command:
    words = (
        "train",
        run,
        "--resume-if-there",
        "--config",
        "c.yaml",
        *options,
        "--threads",
        "1",
        "--offline",
        "--quiet",
    )
    return Command(words, (run,))


WRITERS: dict[str, Command] = {
    "tokenizer": Command(
        ("tokenizer", "train", "roam", "--path", "notes", "--out", "cache/tokenizer", *BUILD),
        ("cache/tokenizer",),
        ("tokenizer", "train", "roam", "--path", "notes", "--out", "cache/tokenizer", "--force", *BUILD),
    ),
    "build_new": Command(
        ("cache", "build", "web", "--cache-dir", "fresh", "--shard-bytes", "1400", *BUILD), ("fresh",)
    ),
    "build_web": Command(("cache", "build", "web", "--shard-bytes", "1400", *BUILD), ("cache/pretrain/web",)),
    "build_notes": Command(("cache", "build", "roam", "--path", "notes", *BUILD), ("cache/pretrain/roam",)),
    "build_chats": Command(("cache", "build", "talk", *BUILD), ("cache/sft/talk",)),
    "build_primer": Command(("cache", "build", "primer", "--path", "primer.txt", *BUILD), ("cache/sft/primer",)),
    "rebuild_web": Command(("cache", "build", "web", "--shard-bytes", "2400", "--force", *BUILD), ()),
    "train_bytes": Command(_train("runs/bytes").words, ("runs/bytes", "streams")),
    "train_tokens": _train("runs/tokens", *TOKENS),
    "train_sft": _train("runs/sft", *SFT),
    "train_splice": _train("runs/splice", *SPLICE),
    "pipeline": Command(
        ("pipeline", "runs/pipe", "--resume-if-there", "--config", "p.yaml", "--threads", "1", "--quiet"),
        ("runs/pipe",),
    ),
    "memorize": Command(
        ("research", "memorize", "runs/bytes", "--threads", "1", "--documents", "2", "--quiet"),
        ("runs/bytes/memorization",),
    ),
    "memorize_splice": Command(
        ("research", "memorize", "runs/splice", "--threads", "1", "--quiet"), ("runs/splice/memorization",)
    ),
    "audit": Command(("audit", "runs/bytes", "--out", "audit", "--threads", "1", "--quiet"), ("audit",)),
}
"""Commands that write, in the order in which the lab is built."""

READERS: dict[str, Command] = {
    "resume_bytes": Command(("train", "runs/bytes", "--resume", "--steps", "8", "--threads", "1", "--quiet")),
    "resume_tokens": Command(("train", "runs/tokens", "--resume", "--steps", "8", "--threads", "1", "--quiet")),
    "resume_sft": Command(("train", "runs/sft", "--resume", "--steps", "8", "--threads", "1", "--quiet")),
    "resume_splice": Command(("train", "runs/splice", "--resume", "--steps", "8", "--threads", "1", "--quiet")),
    "new_bytes": Command(_train("runs/new").words),
    "new_tokens": Command(_train("runs/new", *TOKENS).words),
    "new_sft": Command(_train("runs/new", *SFT).words),
    "new_splice": Command(_train("runs/new", *SPLICE).words),
    "eval_bytes": Command(("eval", "runs/bytes", "--json", "--limit", "300", "--threads", "1")),
    "eval_tokens": Command(("eval", "runs/tokens", "--json", "--threads", "1")),
    "eval_sft": Command(("eval", "runs/sft", "--json", "--threads", "1")),
    "questions": Command(("eval", "runs/sft", "--questions", "--question-file", "q.jsonl", "--json", "--threads", "1")),
    "generate_bytes": Command(("generate", "runs/bytes", "the note", "--seed", "1", "--max-tokens", "8", "--json")),
    "generate_tokens": Command(("generate", "runs/tokens", "the note", "--seed", "1", "--max-tokens", "8", "--json")),
    "chat": Command(("chat", "runs/sft", "--seed", "1", "--max-tokens", "6")),
    "memorize_tokens": Command(("research", "memorize", "runs/tokens", "--documents", "2", "--threads", "1", "--json")),
    "audit_tokens": Command(("audit", "runs/tokens", "--threads", "1", "--json")),
    "verify": Command(("cache", "verify")),
    "inspect": Command(("cache", "inspect", "cache/pretrain/web", "--seed", "1", "--json")),
    "inspect_sft": Command(("cache", "inspect", "cache/sft/talk", "--seed", "1", "--json")),
    "build_again": Command(("cache", "build", "web", "--shard-bytes", "1400", *BUILD)),
    "build_chats_again": Command(("cache", "build", "talk", *BUILD)),
    "build_table": Command(("cache", "build", "table", *BUILD)),
    "show_bytes": Command(("runs", "show", "runs/bytes")),
    "show_tokens": Command(("runs", "show", "runs/tokens")),
    "list": Command(("runs", "list", "--json")),
    "compare": Command(("runs", "compare", "runs/bytes", "runs/tokens", "--out", "both.png")),
    "batch_bytes": Command(("research", "batch", "show", "runs/bytes", "--step", "3", "--json")),
    "batch_tokens": Command(("research", "batch", "show", "runs/tokens", "--step", "3", "--json")),
    "batch_sft": Command(("research", "batch", "show", "runs/sft", "--step", "3", "--json")),
    "coverage": Command(("splice", "coverage", "--config", "c.yaml", *SPLICE, "--steps", "5", "--json")),
    "lint": Command(("data", "lint", "talk", "--json")),
    "stats": Command(("data", "stats", "web", "--config", "c.yaml", "--json")),
    "resume_sharded": Command(("train", "runs/sharded", "--resume", "--steps", "8", "--threads", "1", "--quiet")),
    "generate_sharded": Command(("generate", "runs/sharded", "the note", "--seed", "1", "--max-tokens", "8", "--json")),
    "fit": Command(("splice", "fit", "runs/splice", "runs/splice", "--json")),
    "new_native": Command(
        _train("runs/new", "--set", "train.B=64", "--steps", "3").words, environment=(("NIELS_GPT_NATIVE", "native"),)
    ),
    "pipeline_again": Command(("pipeline", "runs/pipe", "--resume", "--threads", "1", "--quiet")),
}
"""Commands that read what the lab holds."""
COMMANDS = WRITERS | READERS
IGNORED = re.compile(r"(^|/)([a-z]+\.lock|used|\.used|last_used)$|^xdg/|^home/|^native/")
ROUNDED = re.compile(r"^runs/[^/]+/(checkpoints/[^/]+\.pt|metrics\.jsonl|loss\.png|samples/[^/]+)$")
"""Files of a run that differ in rounding if torch computes what a compiled kernel should."""
METRIC_KEYS = ("step", "loss", "lr", "grad_norm", "evals")
"""What two equal runs agree on; the rest of a line is time."""
CLOCK = re.compile(
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?|\b\d+:\d\d(:\d\d)?\b|[\d.,]+[kMG]? (tokens|bytes|positions|tok|windows)/s"
    r"|\"(seconds|tokens_per_s|modified|changed|created|mtime|last_used|age|used)\": [^,}\n]+"
    r"|(\d+ (seconds?|minutes?|hours?) ago|just now)|in [\d.]+ ?s\b"
)


class Result(NamedTuple):
    """What a command gave: its output and every file of the lab, without times."""

    out: str
    files: dict[str, str]


class Lab:
    """A folder with prepared files at a fixed path, and a pristine copy to restore it from."""

    def __init__(self, base: Path, seed: int = 0) -> None:
        self.seed = seed
        self.base = base.resolve()
        self.base.mkdir(parents=True, exist_ok=True)
        self.folder = self.base / "lab"
        self.pristine = self.base / "pristine"
        self._references: dict[str, Result] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._number = 0
        if not self.pristine.exists():
            self._build()

    # --- the folder --------------------------------------------------------------------------------

    def _build(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        write_inputs(self.folder)
        for name, command in WRITERS.items():
            if name in ("build_new", "rebuild_web"):
                continue
            modules = self.base / "modules"
            outcome = self.run(command, work=command_line(*command.words, modules=modules))
            if modules.exists():
                import_modules(modules)
            if outcome.code:
                raise RuntimeError(f"cannot build the lab: {' '.join(command.words)}: {outcome.err}")
        ranks = self.start_ranks((*_train("runs/sharded").words, "--set", "engine.shard=true"))
        outcomes = [rank.wait() for rank in ranks]
        if any(outcome is None or outcome.code for outcome in outcomes):
            raise RuntimeError(f"cannot build the lab: a sharded run: {outcomes}")
        (self.folder / "native").mkdir(mode=0o700)
        self.run(READERS["new_native"])
        self.run(READERS["eval_bytes"])  # builds a stream of the standard library, which takes seconds
        shutil.rmtree(self.folder / "runs/new")
        self.folder.rename(self.pristine)

    def reset(self, *without: str) -> None:
        """Restore the folder; leave out the paths in `without`."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.exists():
            raise RuntimeError(f"cannot remove {self.folder}")
        shutil.copytree(self.pristine, self.folder, symlinks=True)
        for name in without:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.folder / "home"),
            "XDG_CACHE_HOME": str(self.folder / "xdg"),
            "MPLCONFIGDIR": str(self.base / "matplotlib"),
            "HF_HOME": str(self.base / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "NIELS_GPT_NATIVE": "0",  # a kernel that cannot be loaded would change the rounding
            "COLUMNS": "120",
        }

    # --- commands ----------------------------------------------------------------------------------

    def start(
        self,
        command: Command | tuple[str, ...],
        *,
        fault: shim.Fault | None = None,
        before: Callable[[], None] | None = None,
        stdin: bytes = b"hello\n/exit\n",
        environment: dict[str, str] | None = None,
        work: Callable[[], None] | None = None,
    ) -> Running:
        words = command.words if isinstance(command, Command) else command
        extra = dict(command.environment if isinstance(command, Command) else ()) | (environment or {})

        def prepare() -> None:
            if before is not None:
                before()
            if fault is not None:
                shim.arm(self.folder, fault)

        self._number += 1
        output = self.base / f"output{self._number % 8}"
        return Running(
            work or command_line(*words),
            self.folder,
            output,
            environment=self.environment | extra,
            stdin=stdin,
            before=prepare,
        )

    def start_ranks(self, words: tuple[str, ...], size: int = 2) -> list[Running]:
        """Start a command in several processes, as torchrun does."""
        world = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
        return [
            self.start(words, environment=world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(size)
        ]

    def run(self, command: Command | tuple[str, ...], **options: object) -> Outcome:
        outcome = self.start(command, **options).wait()  # type: ignore[arg-type]
        assert outcome is not None
        return outcome

    def result(self, outcome: Outcome) -> Result:
        return Result(CLOCK.sub("CLOCK", outcome.out), snapshot(self.folder))

    def reference(self, name: str) -> Result:
        """Return the result of the undisturbed command, from a fresh lab; under the shim, also count its calls."""
        if name not in self._references:
            command, fault = COMMANDS[name], None
            if shim.loaded():
                log, counters = self.base / "log", self.base / "counters"
                shutil.rmtree(log, ignore_errors=True)
                log.mkdir()
                fault = shim.Fault(counters=str(counters), log=str(log))
            self.reset(*command.makes)
            outcome = self.run(command, fault=fault)
            if outcome.code:
                raise RuntimeError(f"{' '.join(command.words)}: exit code {outcome.code}: {outcome.err}")
            if fault is not None:
                self._counts[name] = shim.read_counters(counters)
            self._references[name] = self.result(outcome)
        return self._references[name]

    def counts(self, name: str) -> dict[str, int]:
        """Return how often the undisturbed command makes each kind of system call under the lab."""
        self.reference(name)
        return self._counts.get(name, {})

    def differences(self, name: str, outcome: Outcome, *, output: bool = True, rounding: bool = True) -> str:
        """Return how a result differs from the undisturbed one, in words; empty if it does not.

        Without `rounding`, the files of ROUNDED need only exist in both.
        """
        reference, result = self._references[name], self.result(outcome)
        changed = sorted(
            path
            for path in reference.files.keys() | result.files.keys()
            if reference.files.get(path) != result.files.get(path)
            and (rounding or not ROUNDED.search(path) or path not in reference.files or path not in result.files)
        )
        words = [
            f"{path} is missing" if path not in result.files
            else f"{path} is left over" if path not in reference.files
            else f"{path} differs"
            for path in changed
        ]  # fmt: skip
        if output and reference.out != result.out:
            words.append("the output differs")
        return ", ".join(words[:6]) + (f" and {len(words) - 6} more" if len(words) > 6 else "")

    def judge(self, name: str, case: str, outcome: Outcome) -> Verdict:
        """Judge the end of a disturbed command: it gave the undisturbed result, or reported the fault and recovers."""
        reason = unclear(outcome)
        if reason:
            return failed(case, reason)
        if not refused(outcome):
            difference = self.differences(name, outcome)
            if not difference:
                return Verdict("held", case)
            if not reports_a_problem(outcome):
                return failed(case, f"silent: exit code 0, no message: {difference}")
        return self.recover(name, case, result="noticed", after=outcome)

    def recover(self, name: str, case: str, *, result: str = "held", after: Outcome | None = None) -> Verdict:
        """Run the command again without a fault; it must give the undisturbed result.

        `after`: the end of the disturbed command. What it trained without its compiled kernels, and said so, stays.
        """
        command = COMMANDS[name]
        outcome = self.run(command._replace(words=command.again or command.words))
        reason = unclear(outcome)
        if reason:
            return failed(case, f"after the fault: {reason}")
        if refused(outcome):
            return failed(case, f"after the fault the command refuses: {outcome.err.strip()[-300:]}")
        if after is not None and has_other_tokenizer(after):
            return Verdict(result, case)
        rounding = after is None or not fell_back(after)
        difference = self.differences(name, outcome, output=False, rounding=rounding)
        return failed(case, f"after the fault: {difference}") if difference else Verdict(result, case)


def snapshot(folder: Path) -> dict[str, str]:
    """Return {path: digest} of all files, without what depends on the clock."""
    result = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and not IGNORED.search(name):
            with contextlib.suppress(FileNotFoundError):  # a temporary file that another process has just renamed
                result[name] = digest(path)
    return result


def digest(path: Path) -> str:
    data = path.read_bytes()
    raw = (path.name, hashlib.sha256(data).digest())
    if raw not in _digests:
        _digests[raw] = _digest(path, data)
    return _digests[raw]


_digests: dict[tuple[str, bytes], str] = {}


def _digest(path: Path, data: bytes) -> str:
    if path.name == "metrics.jsonl":
        data = json.dumps(_metrics(data)).encode()
    elif path.name == "environment.json":
        data = json.dumps(_environment(data)).encode()
    elif path.suffix in (".html", ".json", ".txt"):
        data = CLOCK.sub("CLOCK", data.decode("utf-8", "replace")).encode("utf-8", "replace")
    return hashlib.sha256(data).hexdigest()


def _metrics(data: bytes) -> list[object]:
    lines: list[object] = []
    for line in data.decode("utf-8", "replace").splitlines():
        try:
            row = json.loads(line)
            lines.append({key: row[key] for key in METRIC_KEYS if key in row})
        except (ValueError, TypeError):
            lines.append(line)
    return lines


def _environment(data: bytes) -> object:
    """What is the same after a kill and a resume: the data, and how the run ended."""
    try:
        stored = json.loads(data)
        last = stored["sessions"][-1]
        return [
            stored["fingerprint"],
            [(row["source"], row["train"], row["held_out"]) for row in stored["data"]],
            last["outcome"],
            last["steps"],
        ]
    except (ValueError, LookupError, TypeError, AttributeError):
        return data.decode("utf-8", "replace")


def write_inputs(folder: Path) -> None:
    """Write the texts and configs of a lab: always the same."""
    import pyarrow
    import pyarrow.parquet

    from tests.token_caches import chats, documents
    from tests.training import write_texts

    write_texts(folder)
    texts = documents("fineweb_edu")
    rows = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    talks = "".join(json.dumps({"messages": talk}, ensure_ascii=False) + "\n" for talk in chats("oasst1"))
    for name, text in (
        ("web.jsonl", rows), ("chats.jsonl", talks), ("c.yaml", CONFIG), ("p.yaml", PIPELINE), ("q.jsonl", QUESTIONS),
    ):  # fmt: skip
        (folder / name).write_text(text, encoding="utf-8")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "web.parquet")
    (folder / "home").mkdir()
