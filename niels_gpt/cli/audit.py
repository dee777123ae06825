"""`niels-gpt audit`: which passages of my notes can this checkpoint recite?"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from niels_gpt.cli.memorize import (
    chance_of,
    check_encoding,
    probability,
    progress,
    write_all,
)
from niels_gpt.data.roam import list_roam_paths, read_text
from niels_gpt.memorization.measure import (
    Document,
    ExtractionSettings,
    Measurement,
    measure,
)
from niels_gpt.memorization.membership import (
    HELD_OUT,
    TRAINED,
    UNKNOWN,
    membership,
)
from niels_gpt.memorization.positions import at_every_position
from niels_gpt.memorization.summary import report, top_passages
from niels_gpt.report.html import one_in
from niels_gpt.runs.loading import LoadedRun, is_run, load_run
from niels_gpt.system import files
from niels_gpt.system.console import plural
from niels_gpt.tokenizer import ByteTokenizer

NOT_SAFE = 3
"""Exit code where some passage can be recited; 1 is an error, 2 a wrong option."""
OTHER = "control"
MIN_TOKENS = 16
"""Notes shorter than this are not judged: half of so little can be guessed."""


def run_audit(
    *,
    checkpoint: Path,
    notes: Path,
    control: Path | None,
    threshold: float,
    wanted: Mapping[str, Any],
    top: int,
    out: Path | None,
    encoding_errors: str,
    device: str,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Measure every note, say which passages can be recited, and exit with 3 where there are some."""
    if not 0.0 < threshold <= 1.0:
        raise ValueError(f"--threshold is a probability above 0, at most 1, got {threshold}")
    check_encoding(encoding_errors)
    named_run = is_run(checkpoint)
    loaded = load_run(checkpoint if named_run else None, None if named_run else checkpoint, device, tokenizer)
    settings = ExtractionSettings.fitting(loaded.model.config.T, **wanted)
    found, short = read_notes(notes, loaded, encoding_errors)
    where, why = membership(loaded, found)
    documents = [
        Document(name, ids, control=where[name] == HELD_OUT, source=where[name]) for name, ids in found.items()
    ]
    if control is not None:
        others, _ = read_notes(control, loaded, encoding_errors)
        theirs, _ = membership(loaded, others)
        known = [name for name, status in theirs.items() if status == TRAINED]
        if len(known) == len(others):
            raise ValueError(f"--control {control}: all its notes were trained on, so they show nothing; take others")
        documents += [
            Document(f"control: {name}", ids, control=True, source=OTHER)
            for name, ids in others.items()
            if name not in known
        ]
        if known:
            listed = ", ".join(known[:5]) + (", ..." if len(known) > 5 else "")
            print(f"no controls, because they were trained on: {listed}", file=sys.stderr)
    with progress("auditing") as tell:
        measured = measure(loaded.model, documents, loaded.tokenizer, settings, progress=tell)
    if loaded.model.config.positions == "learned":
        with progress("auditing, at every place") as tell:
            measured = at_every_position(loaded.model, measured, batch=settings.batch, progress=tell)
    result = verdict(measured, loaded, threshold, top)
    result |= {"checkpoint": str(loaded.path), "notes": str(notes), "unknown_because": why, "too_short": short}
    if out is not None:
        title = f"Audit of {loaded.path.name}"
        page = report(loaded.model, measured, loaded.tokenizer, title=title, checkpoint=str(loaded.path),
                      step=loaded.step, passages=max(top, 20), strips=24)  # fmt: skip
        write_all(page, measured, out)
        files.write_json(out / "audit.json", result)
    if as_json:
        print(json.dumps(result, indent=2, ensure_ascii=False))
    else:
        show(result, settings, out)
    if not result["safe"]:
        sys.exit(NOT_SAFE)


def read_notes(folder: Path, loaded: LoadedRun, encoding_errors: str) -> tuple[dict[str, np.ndarray], list[str]]:
    """(name -> ids of every note, the names of those too short to judge). Raises ValueError where no note is left, and
    as `list_roam_paths` and `read_text` do."""
    root = files.expand_home(folder).absolute()
    found, short = {}, []
    for path in list_roam_paths(str(root)):
        name = os.fsencode(Path(path).relative_to(root).as_posix()).decode("utf-8", errors="backslashreplace")
        ids = loaded.encode(read_text(path, errors=encoding_errors))
        if len(ids) < MIN_TOKENS:
            short.append(name)
        else:
            found[name] = ids
    if not found:
        raise ValueError(f"no note in {folder} to look for: it has no .md file of at least {MIN_TOKENS} tokens")
    return found, short


def verdict(measured: Sequence[Measurement], loaded: LoadedRun, threshold: float, top: int) -> dict[str, Any]:
    """Which notes have passages at or over the threshold, held-out ones too (one may be in the training text under
    another name), and what the controls reach."""
    own = [m for m in measured if m.document.source != OTHER]
    controls = [m for m in measured if m.document.control]
    limit = np.log(threshold)
    exposed = [m for m in own if float(m.log_p.max()) >= limit]
    rows = [
        {
            "name": m.document.name,
            "status": m.document.source,
            "windows": len(m.log_p),
            "short": m.short,
            "max_p": float(np.exp(m.log_p.max())),
            "max_log_p": float(m.log_p.max()),
            "over": int((m.log_p >= limit).sum()),
        }
        for m in sorted(measured, key=lambda m: -float(m.log_p.max()))
    ]
    return {
        "safe": not exposed,
        "threshold": threshold,
        "unit": "byte" if isinstance(loaded.tokenizer, ByteTokenizer) else "token",
        "step": loaded.step,
        "notes_audited": len(own),
        "notes_exposed": len(exposed),
        "windows": int(sum(len(m.log_p) for m in own)),
        "windows_over": int(sum((m.log_p >= limit).sum() for m in own)),
        "statuses": dict(Counter(m.document.source for m in measured)),
        "controls": len(controls),
        "control_max_log_p": max((float(m.log_p.max()) for m in controls), default=None),
        "passages": top_passages(own, loaded.tokenizer, most=top),
        "documents": rows,
    }


def show(result: dict[str, Any], settings: ExtractionSettings, out: Path | None) -> None:
    """The verdict, the ranked passages, and what to make of them."""
    status = ", ".join(f"{number} {name}" for name, number in result["statuses"].items())
    print(f"{result['checkpoint']} after {result['step']:,} updates")
    print(f"{plural(result['notes_audited'], 'note')} audited ({status}), {plural(result['windows'], 'passage')} of "
          f"{settings.window} {result['unit']}s, {settings.prompt} of them given")  # fmt: skip
    if result["too_short"]:
        names = ", ".join(result["too_short"][:5]) + (", ..." if len(result["too_short"]) > 5 else "")
        short = plural(len(result["too_short"]), "note")
        print(f"{short} of fewer than {MIN_TOKENS} {result['unit']}s not judged: {names}")
    if UNKNOWN in result["statuses"]:
        print(f"some are {UNKNOWN}: {result['unknown_because']}")
    print("\nthe passages it knows best")
    for rank, passage in enumerate(result["passages"], 1):
        print(
            f"{rank:>3}. P(z) = {chance_of(passage)}  {passage['document']}, from {result['unit']} {passage['start']:,}"
        )
        print(f"     given  {passage['prompt'][-70:]!r}")
        print(f"     says   {passage['suffix'][:70]!r}")
    if result["controls"]:
        highest = result["control_max_log_p"]
        print(f"\ncontrols, never trained on: {plural(result['controls'], 'note')}; their best known passage has "
              f"P(z) = {probability(float(np.exp(highest)))} ({one_in(highest)})")  # fmt: skip
        if highest >= np.log(result["threshold"]):
            print("that is over the threshold too: such text can be guessed, and is not proof of memorisation")
    else:
        print("\nno held-out notes to compare with: --control FOLDER takes notes that were never trained on")
    if out is not None:
        print(f"report: {out}/report.html, audit.json, documents.csv, windows.csv")
    limit = f"P(z) >= {result['threshold']:g}"
    if result["safe"]:
        print(
            f"\nSAFE TO PUBLISH by this measure: no passage of {plural(result['notes_audited'], 'note')} has {limit}."
        )
        print("It says nothing of passages in other words, of shorter secrets, or of text that was not audited.")
    else:
        print(f"\nNOT SAFE TO PUBLISH: {plural(result['windows_over'], 'passage')} of "
              f"{plural(result['notes_exposed'], 'note')} have {limit}: they come back in "
              f"{1 / result['threshold']:,.0f} tries or fewer, on average.")  # fmt: skip
