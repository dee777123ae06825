"""`python -m tests.campaign`: run cases of all kinds for some minutes, and print what was tried and what held."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.campaign import processes, shim
from tests.campaign.lab import Lab
from tests.campaign.verdicts import Verdict, add_tables, count, failed, table

KINDS = {
    "kills": 2.0, "power_cuts": 2.0, "errors": 3.0, "flips": 3.0, "fuzz": 2.0, "concurrency": 1.0, "limits": 1.0,
    "ddp": 0.7,
}  # fmt: skip
"""The kinds of cases, and their shares of the time."""
NEED_SHIM = ("power_cuts", "errors")


def main() -> int:
    if sys.argv[1:2] == ["table"]:
        print(table(add_tables(map(Path, sys.argv[2:]))))
        return 0
    options = _parser().parse_args()
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    kinds = (
        [options.case.partition(":")[0]] if options.case else options.only.split(",") if options.only else list(KINDS)
    )
    for kind in kinds:
        if kind not in KINDS:
            raise SystemExit(f"error: no kind {kind!r}: choose from {', '.join(KINDS)}")
    given = options.work or os.environ.get("CAMPAIGN_WORK")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # fsync costs nothing there
    work = Path(given or tempfile.mkdtemp(prefix="niels-gpt-campaign-", dir=memory)).resolve()
    work.mkdir(parents=True, exist_ok=True)
    _run_under_shim(work, seed)
    print(f"campaign with --seed {seed}, in {work}", flush=True)
    if not shim.loaded():
        kinds = [kind for kind in kinds if kind not in NEED_SHIM]
        print(f"no C compiler: without {', '.join(NEED_SHIM)}, and kills at random instants only")
    processes.warm_up()
    deadline = time.monotonic() + 60 * options.minutes
    jobs = 1 if options.case else options.jobs
    children = []
    for job in range(jobs):
        child = os.fork() if jobs > 1 else 0
        if child == 0:
            code = _work(work, job, jobs, seed, kinds, deadline, options)
            if jobs > 1:
                os._exit(code)
        children.append(child)
    broken = any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children) if jobs > 1 else False
    lines = [
        json.loads(line)
        for job in range(jobs)
        if (work / str(job) / "verdicts.jsonl").exists()
        for line in (work / str(job) / "verdicts.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    counts = count((line["kind"], line["result"]) for line in lines)
    counts = {kind: counts[kind] for kind in KINDS if kind in counts}
    failures = [line for line in lines if line["result"] == "failed"]
    print(f"\nseed {seed}, {options.minutes:g} minutes, {jobs} jobs\n{table(counts)}")
    if options.json:
        Path(options.json).write_text(
            json.dumps({"seed": seed, "counts": counts, "failures": failures}, indent=1), encoding="utf-8"
        )
    if failures or broken:
        print(f"{len(failures)} failed; their folders are in {work / 'failed'}")
    elif not options.work:
        shutil.rmtree(work)
    return int(bool(failures) or broken)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="time for the cases; at least one of each kind runs")
    parser.add_argument("--seed", type=int, help="repeats the cases of a campaign; default: a new one")
    parser.add_argument("--only", help=f"kinds, separated by commas: {', '.join(KINDS)}")
    parser.add_argument("--case", help="one case, such as kills:17")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run cases")
    parser.add_argument("--work", help="folder to work in, which is kept; default: a temporary one")
    parser.add_argument("--json", help="write the table and the failures to this file; `table FILE...` adds them")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    return parser


def _run_under_shim(work: Path, seed: int) -> None:
    """Start this program again under the shim, with one thread: a process with threads cannot fork safely."""
    if os.environ.get("CAMPAIGN_WORK"):
        del os.environ["CAMPAIGN_WORK"]
        return
    compiled = shim.compile_shim(work)
    os.environ.update(CAMPAIGN_WORK=str(work), OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    os.environ.pop("NIELS_GPT_DEBUG", None)
    if compiled is not None:
        os.environ["LD_PRELOAD"] = str(compiled)
    sys.stdout.flush()
    arguments = [*sys.argv[1:], "--seed", str(seed)]
    os.execv(sys.executable, [sys.executable, "-m", "tests.campaign", *arguments])


def _work(
    work: Path, job: int, jobs: int, seed: int, kinds: list[str], deadline: float, options: argparse.Namespace
) -> int:
    """Run the cases of one job: every `jobs`-th number of each kind, until the time is over."""
    base = work / str(job)
    base.mkdir(exist_ok=True)
    with (base / "verdicts.jsonl").open("w", encoding="utf-8") as file:
        modules = {kind: importlib.import_module(f"tests.campaign.{kind}") for kind in kinds}
        lab = Lab(base, seed)
        if options.case:
            kind, _, number = options.case.partition(":")
            _one(lab, modules[kind], kind, int(number), seed, file, work, verbose=True)
            return 0
        numbers, spent = dict.fromkeys(kinds, job), dict.fromkeys(kinds, 0.0)
        while time.monotonic() < deadline or 0.0 in spent.values():
            kind = min(kinds, key=lambda kind: spent[kind] / KINDS[kind])
            began = time.monotonic()
            _one(lab, modules[kind], kind, numbers[kind], seed, file, work, verbose=options.verbose)
            spent[kind] += time.monotonic() - began
            numbers[kind] += jobs
    for name in ("lab", "pristine", "before", "log"):
        shutil.rmtree(base / name, ignore_errors=True)
    return 0


def _one(
    lab: Lab, module: object, kind: str, number: int, seed: int, file: object, work: Path, *, verbose: bool
) -> Verdict:
    """Run one case, and record its verdict."""
    try:
        verdict = module.case(lab, random.Random(f"{seed}/{kind}/{number}"), number)  # type: ignore[attr-defined]
    except Exception as err:  # a fault of the campaign itself, or an undisturbed command that fails
        traceback.print_exc()
        verdict = failed("the campaign itself", f"{type(err).__name__}: {err}")
    line = {"kind": kind, "number": number, "seed": seed, **verdict._asdict()}
    file.write(json.dumps(line) + "\n")  # type: ignore[attr-defined]
    file.flush()  # type: ignore[attr-defined]
    if verdict.result == "failed":
        kept = work / "failed" / f"{kind}-{number}"
        shutil.rmtree(kept, ignore_errors=True)
        if lab.folder.exists():
            with contextlib.suppress(shutil.Error):  # files that vanish, or that a fault made unreadable
                shutil.copytree(lab.folder, kept, symlinks=True)
        print(f"FAILED {kind}:{number} {verdict.case}\n  {verdict.reason}", flush=True)
        print(f"  repeat: python -m tests.campaign --seed {seed} --case {kind}:{number}", flush=True)
    elif verbose:
        print(f"{verdict.result} {kind}:{number} {verdict.case} {verdict.reason}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
