"""Which models may be exported: private sources, stored audits of exactly these weights, refusals."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from niels_gpt.cache.sources.build import build, install_tokenizer
from niels_gpt.cache.sources.texts import BuildSettings
from niels_gpt.data import embedded
from niels_gpt.data.registry import sources
from niels_gpt.export import audit_gate
from niels_gpt.export.audit_gate import FOLDER, Clearance, check, private_sources, refusal, stored_verdict
from niels_gpt.memorization.audit import NOT_JUDGED, NOT_SAFE, SAFE
from niels_gpt.model.digest import weights_digest
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.loading import load_run
from tests import token_caches
from tests.runs.test_loading import make_run
from tests.training import small_config

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def verdict_of(loaded, verdict, **changes):
    """A stored audit as a dict, with what the gate reads."""
    fields = {"verdict": verdict, "weights": weights_digest(loaded.model), "interrupted": False, "because": ["a part"]}
    fields |= {"shortfalls": [], "private_pieces": [], "secrets": [], "min_notes": 3}
    counts = {"windows_over": 3, "notes_exposed": 2, "windows": 50, "notes_audited": 9, "threshold": 0.001}
    return {**fields, **counts, **changes}


def store(run, name, content):
    folder = run.path / name
    folder.mkdir()
    (folder / "audit.json").write_text(json.dumps(content), encoding="utf-8")


def run_of(*overrides):
    return make_run("run", config=small_config(Path("data"), *overrides))


def test_sources_are_private_unless_they_are_known_to_be_public():
    shares = "train.p_train={roam: 0.5, primer: 0.5}"
    cases = [
        ((shares,), ["roam", "primer"]),
        ((shares, "data.roam=embedded"), ["primer"]),
        ((shares, "data.roam=embedded", "data.primer=embedded"), []),
        (("train.p_train={wiki: 1.0}", "data.wiki=embedded"), []),
    ]
    for overrides, expected in cases:
        run = run_of(*overrides)
        assert private_sources(load_run("run", None, "cpu")) == expected
        shutil.rmtree(run.path)


def test_own_sources_are_private_unless_they_have_a_licence(tmp_path):
    (tmp_path / "mine.txt").write_text("x", encoding="utf-8")
    for licence, expected in (("", ["mine"]), (", licence: CC0", [])):
        source = f"data.sources={{mine: {{path: mine.txt{licence}}}}}"
        run = run_of(source, "train.p_train={mine: 1.0}", "train.p_val={mine: 1.0}")
        assert private_sources(load_run("run", None, "cpu")) == expected
        shutil.rmtree(run.path)


def test_texts_of_the_package_in_token_caches_are_public(tmp_path):
    """By the hash of their files: a cache does not say where they were."""
    shutil.copytree(embedded.NOTES, tmp_path / "notes")
    (tmp_path / "notes" / "mine.md").write_text("Something of mine.", encoding="utf-8")
    config = token_caches.small_config("pretrain", "train.p_train={roam: 1.0}", "train.p_val={roam: 1.0}")
    for cache, notes, expected in (("a", embedded.NOTES, []), ("b", tmp_path / "notes", ["roam"])):
        settings = BuildSettings(tmp_path / cache, roam=notes)
        build(sources()["roam"], settings, install_tokenizer(token_caches.tokenizer(), settings.cache_dir))
        data = dataclasses.replace(config.data, token_cache=str(settings.cache_dir))
        run = make_run("run", config=dataclasses.replace(config, data=data), tokenizer=token_caches.tokenizer())
        assert private_sources(load_run("run", None, "cpu")) == expected
        shutil.rmtree(run.path)


def test_an_imported_model_has_nothing_to_audit(tmp_path):
    run = run_of()
    run.source_path.write_text("{}")
    with pytest.raises(ValueError, match=r"imported.*niels-gpt audit run --notes"):
        audit_gate.audit(load_run("run", None, "cpu"))


def test_the_runs_before_count_and_a_checkpoint_alone_is_unknown(tmp_path):
    make_run("base", config=small_config(Path("data")), best=2)
    config = token_caches.small_config("sft", f"init_from={tmp_path / 'base/checkpoints/best.pt'}")
    make_run("chat", config=config, tokenizer=token_caches.tokenizer())
    assert {"roam", "primer"} <= set(private_sources(load_run("chat", None, "cpu")))
    model = GPT({"T": 16, "C": 16, "L": 1, "H": 2})
    save_checkpoint("alone.pt", model, None, 5, model.config)
    [problem] = private_sources(load_run("alone.pt", None, "cpu"))
    assert "alone.pt" in problem
    save_checkpoint("untrained.pt", model, None, 0, model.config)
    assert private_sources(load_run("untrained.pt", None, "cpu")) == []


@pytest.mark.parametrize("base", ["hf:some/model", "base/checkpoints/best.pt"])
def test_a_public_base_has_no_private_sources(tmp_path, base):
    """An imported model is a run of step 0, whose config names sources that it was never trained on."""
    imported = make_run("base", config=small_config(Path("data")), steps=(0,), best=0)
    imported.source_path.write_text(json.dumps({"name": "public", "licence": ""}))
    config = small_config(Path("data"), "train.p_train={primer: 1.0}")
    init_from = base if base.startswith("hf:") else str(tmp_path / base)
    make_run("run", config=dataclasses.replace(config, init_from=init_from))
    assert private_sources(load_run("run", None, "cpu")) == ["primer"]
    assert private_sources(load_run("base", None, "cpu")) == []


def test_an_import_with_a_damaged_record_may_have_private_sources():
    imported = make_run("base", config=small_config(Path("data")), steps=(0,), best=0)
    imported.source_path.write_text('{"name": "public"')
    [source] = private_sources(load_run("base", None, "cpu"))
    assert str(imported.source_path) in source


def test_a_run_that_failed_in_its_first_step_has_the_sources_of_the_run_before(tmp_path):
    """Out of memory in the first step, it saves a checkpoint of step 0: the weights that it started from."""
    make_run("base", config=small_config(Path("data")), best=2)
    public = small_config(Path("data"), "train.p_train={wiki: 1.0}", "data.wiki=embedded")
    init_from = str(tmp_path / "base/checkpoints/best.pt")
    make_run("failed", config=dataclasses.replace(public, init_from=init_from), steps=(0,))
    loaded = load_run("failed", None, "cpu")
    assert loaded.step == 0 and {"roam", "primer"} <= set(check(loaded).private) and check(loaded).trained
    after = dataclasses.replace(public, init_from=str(loaded.path.resolve()))
    make_run("after", config=after)
    assert {"roam", "primer"} <= set(private_sources(load_run("after", None, "cpu")))


def test_only_audits_of_these_weights_count_and_the_worst_of_them():
    run = run_of()
    loaded = load_run("run", None, "cpu")
    assert stored_verdict(loaded) is None
    store(run, "damaged", "no object")
    store(run, "older", {"verdict": SAFE, "checkpoint": str(loaded.path)})
    store(run, "partial", verdict_of(loaded, SAFE, interrupted=True))
    store(run, "others", verdict_of(loaded, NOT_SAFE, weights="0" * 32))
    assert stored_verdict(loaded) is None
    for name, verdict in (("a", SAFE), ("b", NOT_JUDGED), ("c", NOT_SAFE), ("d", SAFE)):
        store(run, name, verdict_of(loaded, verdict))
        worst = {"a": SAFE, "b": NOT_JUDGED}.get(name, NOT_SAFE)
        assert stored_verdict(loaded)["verdict"] == check(loaded).judgment == worst
    with torch.no_grad():
        loaded.model.norm.weight[0] += 1e-3
    assert stored_verdict(loaded) is None


def test_refusals(tmp_path):
    run_of()
    loaded = load_run("run", None, "cpu")
    public = Clearance([], None)
    assert refusal(public, tmp_path) is None and not audit_gate.needs_audit(public) and "public" in public.sentence()
    unknown = Clearance(["roam"], None)
    reason, remedy = refusal(unknown, tmp_path)
    assert str(tmp_path) in reason and "roam" in reason and "--audit" in remedy and "--anyway" in remedy
    assert audit_gate.needs_audit(unknown) and unknown.judgment == NOT_JUDGED
    imported = Clearance(["mine"], None, base="mine", trained=False)  # has no text of its own: --audit would fail
    assert not audit_gate.needs_audit(imported) and imported.judgment == NOT_JUDGED
    remedy = refusal(imported, tmp_path).remedy
    assert "--audit" not in remedy and "niels-gpt audit" not in remedy and "--anyway" in remedy
    for verdict, expected in ((SAFE, None), (NOT_JUDGED, "a part"), (NOT_SAFE, "3 passages of 2 documents")):
        audited = Clearance(["roam"], verdict_of(loaded, verdict))
        found = refusal(audited, tmp_path)
        assert found is None if expected is None else expected in found.reason and "--anyway" in found.remedy
        assert audited.sentence().startswith(f"{verdict}:") and "50 passages in 9 documents" in audited.sentence()
    none = Clearance(["roam"], verdict_of(loaded, SAFE, windows_over=0, notes_exposed=0)).sentence()
    assert "no passage" in none and "50 passages in 9 documents" in none and not re.search(r"\b0 ", none)
    assert refusal(Clearance([], verdict_of(loaded, NOT_SAFE)), tmp_path)  # even if its sources are public


def test_looser_audits_and_those_of_older_versions_clear_no_model():
    run = run_of()
    loaded = load_run("run", None, "cpu")
    for verdict in (SAFE, NOT_JUDGED):
        store(run, "loose", verdict_of(loaded, verdict, shortfalls=["--threshold 0.999 is above 0.001"]))
        found = check(loaded)
        assert found.verdict is None and found.judgment == NOT_JUDGED and audit_gate.needs_audit(found)
        assert "0.999" in refusal(found, loaded.path).reason and "SAFE" not in found.sentence()
        shutil.rmtree(run.path / "loose")
    older = verdict_of(loaded, SAFE)
    del older["private_pieces"]  # and so the first tokens of a text were not judged
    store(run, "older", older)
    assert check(loaded).verdict is None and "older" in check(loaded).rejected
    store(run, "worse", verdict_of(loaded, NOT_SAFE, shortfalls=["--stride 20 is above 5"]))
    assert check(loaded).judgment == NOT_SAFE  # a recited passage is one, however few were looked at
    shutil.rmtree(run.path / "worse")
    store(run, "strict", verdict_of(loaded, SAFE))
    assert check(loaded).judgment == SAFE and check(loaded).rejected == ""


def test_a_model_with_private_pieces_is_refused(tmp_path):
    run_of()
    loaded = load_run("run", None, "cpu")
    pieces = [{"piece": "Quizzlebrandt", "notes": 1}]
    verdict = verdict_of(loaded, NOT_SAFE, windows_over=0, notes_exposed=0, private_pieces=pieces)
    found = refusal(Clearance(["roam"], verdict), tmp_path)
    assert "1 piece" in found.reason and "fewer than 3 notes" in found.reason and "tokenizer" in found.remedy
    sentence = Clearance(["roam"], verdict).sentence()
    assert "1 piece" in sentence and "Quizzlebrandt" not in sentence + found.reason


def test_advice_tells_what_the_base_knew_from_what_was_learned(tmp_path):
    run_of()
    loaded = load_run("run", None, "cpu")
    for known, remedy, sentence in (
        (0, "remove them from the data", "the base knew 0 before; 3 were learned here"),
        (2, "knows 2 of them already, and 1 were learned", "the base knew 2 before; 1 were learned here"),
        (3, "another base", "the base knew 3 before; 0 were learned here"),
    ):
        found = Clearance(["roam"], verdict_of(loaded, NOT_SAFE, base="some/model", windows_known=known))
        assert remedy in refusal(found, tmp_path).remedy and sentence in found.sentence()
        assert ("train again" in refusal(found, tmp_path).remedy) is (known < 3)
    assert "the base" not in Clearance(["roam"], verdict_of(loaded, NOT_SAFE)).sentence()


def test_not_safe_is_not_forgotten_and_a_folder_that_cannot_be_written_is_reported(tmp_path):
    from tests.cli import reciting

    place = reciting.copy_to(tmp_path / "place")
    loaded = load_run(place / "run", None, "cpu")
    with reciting.one_thread():
        verdict = audit_gate.audit(loaded)
    safe = dataclasses.replace(verdict, verdict=SAFE, safe=True)
    assert audit_gate.remember(loaded, safe) == "" and stored_verdict(loaded)["verdict"] == NOT_SAFE
    shutil.rmtree(place / "run" / FOLDER)
    (place / "run" / FOLDER).write_text("in the way")
    assert FOLDER in audit_gate.remember(loaded, safe)


def test_an_audit_is_stored_and_found_again(tmp_path):
    from tests.cli import reciting

    place = reciting.copy_to(tmp_path / "place")
    loaded = load_run(place / "run", None, "cpu")
    with reciting.one_thread():
        verdict = audit_gate.audit(loaded)
    assert verdict.verdict == NOT_SAFE and (place / "run" / FOLDER / "audit.json").is_file()
    found = stored_verdict(load_run(place / "run", None, "cpu"))
    assert (found["verdict"], found["windows_over"]) == (NOT_SAFE, verdict.windows_over)
    assert audit_gate.with_verdict(Clearance([], None), verdict).judgment == NOT_SAFE
