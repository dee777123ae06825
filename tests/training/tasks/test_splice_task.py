"""The task splice, against files, losses and counts put together by hand."""

import collections
import dataclasses
import math
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from niels_gpt.config.yaml_file import load_config
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.folder import RunFolder
from niels_gpt.splice import MultiSpliceDocumentDataset
from niels_gpt.training.loop import train
from niels_gpt.training.tasks.splice_task import (
    SpliceTask,
    grid,
    unique_names,
    with_steps_of_epochs,
)
from tests import token_caches
from tests.cache import no_waiting, split_rule
from tests.splice import NULL, documents, example, schedules
from tests.splice import spans as naive_spans
from tests.training import sentence

T, B = 24, 6
SMALL = [
    *f"task=splice model.T={T} model.C=16 model.L=1 model.H=2 model.dropout=0.0".split(),
    *f"train.total_steps=6 train.warmup_steps=1 train.base_lr=1e-2 train.min_lr=1e-3 train.B={B} train.seed=7".split(),
    *["output.checkpoint_every=4", "output.eval_every=3", "output.sample_every=0", "output.sample_tokens=4"],
    *["data.roam_val_frac=0.3", "splice.num_docs=3"],
]
NOTES = {f"note_{i:02d}.md": f"# {i}\n{sentence(i, 3 + 2 * (i % 6))}\n" for i in range(14)}
PARTS = split_rule(sorted(NOTES), 0.3, 42)
CHOSEN = sorted(PARTS["train"], key=lambda name: -len(NOTES[name].encode()))[:3]
"""The longest three, ties to the first: what the config chooses."""
SWEEP = ["splice.content_start_mode=slide_within", "splice.content_length=8", "splice.balance_mode=by_coverage"]


@pytest.fixture(autouse=True, scope="module")
def quick():
    with no_waiting():
        yield


def write_notes(folder, notes=NOTES):
    """Write <folder>/notes; returns the folder."""
    (folder / "notes").mkdir()
    for name, text in notes.items():
        (folder / "notes" / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_notes(tmp_path_factory.mktemp("splice"))


def config_of(place, *overrides):
    paths = [f"data.roam={place / 'notes'}", f"data.cache_dir={place / 'streams'}"]
    return load_config(None, overrides=[*SMALL, *paths, *overrides])


def task_of(place, *overrides):
    return SpliceTask(config_of(place, *overrides))


def token_task(*overrides, name="fineweb_edu"):
    options = ["task=splice", "splice.documents=tokens", f"splice.dataset_name={name}", "splice.num_docs=4"]
    return SpliceTask(token_caches.small_config("splice", *options, f"model.T={T}", *overrides))


def content(name):
    return list(NOTES[name].encode("utf-8"))


def spans_in(batch):
    """The ids of every segment of a batch that has targets, each with the position of its first token."""
    found = []
    for row in range(len(batch.x)):
        ids, targets = batch.x[row].tolist(), batch.targets[row].tolist()
        segments = [1] * len(ids) if batch.segments is None else batch.segments[row].tolist()
        positions = range(len(ids)) if batch.positions is None else batch.positions[row].tolist()
        for segment in sorted(set(segments)):
            at = [i for i, other in enumerate(segments) if other == segment]
            last = max((i for i in at if targets[i] != -100), default=None)
            if last is not None:
                first = min(i for i in at if targets[i] != -100)
                assert targets[first : last + 1] == ids[first + 1 : last + 2]
                found.append((tuple(ids[first : last + 2]), positions[first]))
    return found


# --- batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        SWEEP,
        ["splice.sampler=stream", "splice.offset_jitter=3", "splice.content_length=10"],
        ["splice.curriculum=2", "splice.balance_mode=by_document"],
    ],
    ids=["sweep", "stream", "curriculum"],
)
def test_a_batch_depends_on_the_step_alone(place, overrides):
    packed = "false" if overrides == SWEEP else "true"
    first, second = (task_of(place, *overrides, f"splice.packed={packed}") for _ in range(2))
    forward = [first.batch(step) for step in range(8)]
    shuffled = {step: second.batch(step) for step in (7, 2, 5, 0, 6, 1, 3, 4)}
    for step, batch in enumerate(forward):
        for one, other in zip(batch, shuffled[step], strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    assert len({batch.x.numpy().tobytes() for batch in forward}) > 4


@pytest.mark.parametrize("mode", ["coverage_balanced", "anchor_start", "slide_within", "cyclic_roll"])
def test_packed_and_unpacked_batches_have_the_same_spans_at_the_same_positions(place, mode):
    overrides = [f"splice.content_start_mode={mode}", "splice.content_length=7", "splice.offset_stride=2"]
    packed, plain = (task_of(place, *overrides, f"splice.packed={value}") for value in ("true", "false"))
    for step in range(5):
        one, other = packed.batch(step), plain.batch(step)
        assert sorted(spans_in(one)) == sorted(spans_in(other))
        assert len(spans_in(one)) == B
        assert one.x.shape[0] < B == other.x.shape[0]
        assert other.x.shape[1] == T
        assert other.positions is None


def test_an_epoch_has_every_example_once(place):
    """The expected examples come from naive loops."""
    task = task_of(place, *SWEEP, "splice.offset_stride=9", "splice.content_stride=3", "train.B=1")
    options = {"content_length": 8, "content_start_mode": "slide_within", "offset_stride": 9, "content_stride": 3}
    wanted = [
        (tuple(content(name)[t : t + length]), s)
        for name in CHOSEN
        for t, s, length in naive_spans(S=T, L=len(content(name)), **options)
    ]
    for epoch in range(2):
        steps = range(epoch * len(wanted), (epoch + 1) * len(wanted))
        found = [span for step in steps for span in spans_in(task.batch(step))]
        assert collections.Counter(found) == collections.Counter(wanted)


def test_without_shuffling_examples_come_in_order(place):
    task = task_of(place, "splice.balance_mode=by_coverage", "splice.shuffle=false", "splice.content_length=10")
    first = content(CHOSEN[0])
    rows = [span for step in range(2) for span in spans_in(task.batch(step))]
    assert rows == [(tuple(first[t : t + 10]), T - 10) for t in range(2 * B)]


def test_packed_is_the_default_for_rope(place):
    assert task_of(place).packed is True
    assert task_of(place, "model.positions=learned").packed is False
    assert task_of(place, "splice.packed=false").packed is False
    assert task_of(place, "model.positions=learned", "splice.packed=true").packed is True


def test_a_curriculum_adds_documents_one_by_one(place):
    task = task_of(place, "splice.curriculum=4", "splice.balance_mode=by_document", "splice.content_length=8")
    for step in range(16):
        seen = {origin.document.split(" at ")[0] for origin in task.origins(step)}
        assert seen <= set(CHOSEN[: 1 + step // 4])
    later = {origin.document.split(" at ")[0] for step in range(8, 20) for origin in task.origins(step)}
    assert later == set(CHOSEN)


def test_one_document_by_its_index(place):
    number = 4
    task = task_of(place, f"splice.doc_index={number}")
    assert task.chosen == [number]
    assert {origin.document.split(" at ")[0] for origin in task.origins(0)} == {PARTS["train"][number]}


# --- origins ----------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [SWEEP, ["splice.content_start_mode=cyclic_roll", "splice.content_length=9"]])
def test_origins_are_the_text_of_the_files(place, overrides):
    task = task_of(place, *overrides)
    stream = (place / "streams" / "roam_train.bin").read_bytes()
    for step in range(4):
        rows = task.origins(step)
        assert [row.row for row in rows] == list(range(B))
        texts = []
        for row in rows:
            name, s = re.fullmatch(r"(.*) at s=(\d+)", row.document).groups()
            text = row.text.encode("utf-8")
            twice = NOTES[name].encode("utf-8") * 2  # cyclic_roll wraps around
            assert twice[row.offset : row.offset + len(text)] == text
            assert stream[row.stream_offset] == text[0]
            inside = stream.find(NOTES[name].encode("utf-8"))
            assert row.stream_offset == inside + row.offset
            assert row.source == "roam"
            texts.append((tuple(text), int(s)))
        assert sorted(texts) == sorted(spans_in(task.batch(step)))


def test_origins_of_tokens():
    task = token_task("splice.content_length=7")
    stream = token_caches.stream("fineweb_edu")
    for row in task.origins(3):
        ids = stream[row.stream_offset : row.stream_offset + 7]
        assert row.text == token_caches.tokenizer().decode(ids)


def test_the_source_is_described(place):
    (row,) = task_of(place).describe()
    train = sum(len(content(name)) for name in CHOSEN)
    held_out = sum(len(content(name)) for name in controls_of(3))
    assert row == ("roam", 1.0, train, held_out, "B", 3, str(place / "notes"))
    (tokens,) = token_task().describe()
    assert (tokens.source, tokens.unit, tokens.documents) == ("fineweb_edu", " tokens", 4)


# --- controls ----------------------------------------------------------------------------------------


def controls_of(number, chosen=CHOSEN):
    """The held-out notes nearest in length to the median of the chosen ones."""
    middle = np.median([len(content(name)) for name in chosen])
    return sorted(PARTS["val"], key=lambda name: abs(len(content(name)) - middle))[:number]


@pytest.mark.parametrize("number", [0, 1, 3, 50])
def test_controls_are_held_out_documents_of_about_the_same_length(place, number):
    task = task_of(place, f"splice.controls={number}")
    found = [task.documents.held_out.name(i) for i in task.controls]
    assert found == controls_of(number)
    assert not set(found) & set(PARTS["train"])


def test_documents_too_short_for_an_example_are_not_controls(place):
    shortest = sorted(len(content(name)) for name in PARTS["val"])[1]
    task = task_of(place, "splice.controls=50", f"splice.min_copy_len={min(shortest, T)}", "splice.num_docs=1")
    lengths = [len(content(task.documents.held_out.name(i))) for i in task.controls]
    assert lengths
    assert min(lengths) >= min(shortest, T)


def test_a_copy_of_a_trained_document_is_not_a_control(tmp_path):
    """A held-out note of the same length with other text is."""
    trained = CHOSEN[0]
    text = NOTES[trained]
    near = sorted(PARTS["val"], key=lambda name: abs(len(content(name)) - len(content(trained))))[:2]
    write_notes(tmp_path, NOTES | {near[0]: text, near[1]: text[:-2] + "!\n"})
    task = task_of(tmp_path, "splice.num_docs=1", "splice.controls=50")
    assert [task.names, task.controls and task.documents.held_out.name(task.controls[0])] == [[trained], near[1]]
    assert {task.documents.held_out.name(i) for i in task.controls} == set(PARTS["val"]) - {near[0]}
    found, _ = task.evaluate(model_of(task.config), "cpu")
    assert f"loss/control {near[1]}" in found
    assert f"loss/control {near[0]}" not in found
    # One that was not chosen was not trained on: its copy is a control.
    other = task_of(tmp_path, "splice.num_docs=1", "splice.controls=50", "splice.doc_select_mode=shortest")
    assert len(other.controls) == len(PARTS["val"])


def test_without_held_out_documents_there_is_no_control(tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    shutil.rmtree(root / "pretrain" / "fineweb_edu" / "val")
    task = token_task(f"data.token_cache={root}")
    assert task.controls == []
    found, value = task.evaluate(model_of(task.config), "cpu")
    assert "control" not in found
    assert value == found["splice"]


# --- evaluation --------------------------------------------------------------------------------------


def model_of(config):
    torch.manual_seed(3)
    model = GPT(config.model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.dim() > 1 else 1)
    return model


def naive_losses(model, docs, sizes, examples, **layout):
    """(nats per token, bits per byte) of each document, one frame at a time, filled token by token."""
    results = []
    for doc in docs:
        found = naive_spans(S=T, L=len(doc), **layout)
        number = min(len(found), examples)
        nats, predicted, size = 0.0, 0, 0
        for j in range(number):
            t, s, length = found[(2 * j + 1) * len(found) // (2 * number)]
            tokens, mask, segments = example(doc, T, t, s, length, filler=0)
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), segments=torch.tensor([segments]))[0].double()
            for i in range(T):
                if mask[i]:
                    nats += (logits[i].logsumexp(0) - logits[i][tokens[i + 1]]).item()
                    predicted += 1
                    size += sizes(tokens[i + 1])
        results.append((nats / predicted, nats / max(size, 1) / math.log(2)))
    return results


LAYOUTS = {
    "default": ([], {}),
    "sweep": (SWEEP, {"content_start_mode": "slide_within", "content_length": 8}),
    "cut": (
        ["splice.content_start_mode=anchor_start", "splice.offset_bound=truncate", "splice.offset_stride=3"],
        {"content_start_mode": "anchor_start", "offset_bound": "truncate", "offset_stride": 3},
    ),
    "jitter": (["splice.content_length=10", "splice.offset_jitter=2"], {"content_length": 10}),
}


@pytest.mark.parametrize(
    ("layout", "positions", "packed"),
    [
        ("default", "rope", "true"),
        ("sweep", "learned", "false"),
        ("cut", "learned", "true"),
        ("jitter", "learned", "false"),
    ],
)
def test_evaluation_equals_that_of_single_frames(place, layout, positions, packed):
    overrides, options = LAYOUTS[layout]
    task = task_of(
        place, *overrides, f"model.positions={positions}", f"splice.packed={packed}", "splice.eval_examples=5"
    )
    model = model_of(task.config).train()
    found, value = task.evaluate(model, "cpu")
    assert model.training
    chosen = naive_losses(model.eval(), [content(name) for name in CHOSEN], lambda i: 1, 5, **options)
    controls = naive_losses(model, [content(name) for name in controls_of(3)], lambda i: 1, 5, **options)
    wanted = {"splice": np.mean([loss for loss, _ in chosen]), "control": np.mean([loss for loss, _ in controls])}
    names = [*CHOSEN, *(f"control {name}" for name in controls_of(3))]
    for name, (loss, bits) in zip(names, [*chosen, *controls], strict=True):
        wanted |= {f"loss/{name}": loss, f"bpb/{name}": bits}
    wanted |= {f"doc_loss/{i}": loss for i, (loss, _) in zip(task.chosen, chosen, strict=True)}
    assert found.keys() == wanted.keys()
    assert found == pytest.approx(wanted, rel=1e-4)
    assert value == found["splice"]
    assert task.evaluate(model, "cpu")[0] == found  # on the same grid


def test_evaluation_of_tokens_counts_the_bytes_of_the_text():
    task = token_task("splice.eval_examples=3", "splice.content_length=9", "splice.controls=2")
    model = model_of(task.config).eval()
    found, _ = task.evaluate(model, "cpu")
    tokenizer, eot = token_caches.tokenizer(), token_caches.special("eot")

    def size(token):
        return 0 if token == eot else len(tokenizer.token_bytes[token])

    for split_documents, numbers, prefix in (
        (task.documents.train, task.chosen, ""),
        (task.documents.held_out, task.controls, "control "),
    ):
        docs = [split_documents.ids(i).tolist() for i in numbers]
        for i, (loss, bits) in zip(numbers, naive_losses(model, docs, size, 3, content_length=9), strict=True):
            assert found[f"loss/{prefix}document {i}"] == pytest.approx(loss, rel=1e-4)
            assert found[f"bpb/{prefix}document {i}"] == pytest.approx(bits, rel=1e-4)


def test_documents_without_examples_are_not_evaluated(place):
    short = min(PARTS["train"], key=lambda name: len(content(name)))
    count = len(PARTS["train"])
    task = task_of(
        place, f"splice.num_docs={count}", "splice.adaptive_k=false", f"splice.content_length={len(content(short)) + 1}"
    )
    found, _ = task.evaluate(model_of(task.config), "cpu")
    assert f"loss/{short}" not in found
    assert f"loss/{CHOSEN[0]}" in found


def test_equal_names_get_a_number():
    names = unique_names(SimpleNamespace(name=lambda i: f"note {i % 290}"), range(300))
    assert names == [f"note {i % 290}" + (f" ({i})" if i % 290 < 10 else "") for i in range(300)]


def test_every_document_has_its_loss(tmp_path):
    write_notes(tmp_path, {f"{i}.md": sentence(i, 3) for i in range(110)})
    task = task_of(tmp_path, "splice.num_docs=70", "data.roam_val_frac=0.1", "splice.eval_examples=1")
    found, _ = task.evaluate(model_of(task.config), "cpu")
    assert {key for key in found if key.startswith("doc_loss/")} == {f"doc_loss/{i}" for i in task.chosen}
    assert len([key for key in found if key.startswith("loss/") and "control" not in key]) == 70
    docs = [list(task.documents.train.ids(i)) for i in task.chosen]
    losses = naive_losses(model_of(task.config).eval(), docs, lambda i: 1, 1)
    assert found["splice"] == pytest.approx(np.mean([loss for loss, _ in losses]), rel=1e-4)


@settings(max_examples=30)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=5), st.integers(1, 20))
def test_the_grid_is_spread_evenly_over_each_document(lengths, examples):
    dataset = MultiSpliceDocumentDataset(
        S=9, doc_tokens_list=documents(lengths), pad_token_id=NULL, content_start_mode="slide_within", content_length=4
    )
    found = list(zip(*(part.tolist() for part in grid(dataset, examples)), strict=True))
    for number, length in enumerate(lengths):
        spans = naive_spans(S=9, L=length, content_start_mode="slide_within", content_length=4)
        indices = [spans.index(tuple(span)) for doc, *span in found if doc == number]
        assert len(indices) == min(len(spans), examples) == len(set(indices))
        assert indices == sorted(indices)
        gaps = np.diff([-1, *indices, len(spans)])
        assert max(gaps) <= len(spans) / len(indices) + 1


# --- fingerprints ------------------------------------------------------------------------


def test_the_fingerprint_changes_with_the_choice(place, tmp_path):
    base = task_of(place).fingerprint()
    assert base == task_of(place).fingerprint()
    others = [["splice.num_docs=2"], ["splice.doc_select_mode=shortest"], ["splice.doc_index=1"], ["data.seed=1"]]
    found = [task_of(place, *change).fingerprint() for change in others]
    assert all(other != base for other in found)
    assert task_of(place, "splice.content_length=9").fingerprint() == base, "the same documents"
    assert not [value for value in base.values() if str(place) in value]


def test_the_fingerprint_changes_with_the_text(tmp_path):
    before = task_of(write_notes(tmp_path)).fingerprint()
    (tmp_path / "notes" / CHOSEN[1]).write_text(NOTES[CHOSEN[1]].upper(), encoding="utf-8")
    assert task_of(tmp_path).fingerprint() != before


def test_the_fingerprint_of_tokens_names_the_tokenizer():
    found = token_task().fingerprint()
    assert found["tokenizer"] == token_caches.tokenizer().sha256
    assert found.keys() == {"fineweb_edu", "documents", "tokenizer"}
    assert found != token_task(name="roam").fingerprint()


# --- notes for the user ---------------------------------------------------------------------------


def warning_of(task):
    return "".join(line for line in task.notes() if line.startswith("warning"))


@pytest.mark.parametrize(
    ("mode", "bound", "K", "stride", "step"), [("slide_within", "truncate", 8, 2, 3), ("cyclic_roll", "tight", 8, 3, 1)]
)
def test_a_sweep_over_offsets_repeats_spans_under_rope(place, mode, bound, K, stride, step):
    names = {"content_start_mode": mode, "offset_bound": bound, "content_length": K}
    names |= {"content_stride": stride, "offset_stride": step}
    overrides = [f"splice.{key}={value}" for key, value in names.items()]
    task = task_of(place, *overrides, "splice.balance_mode=by_coverage")
    spans = [(i, *span) for i, name in enumerate(CHOSEN) for span in naive_spans(S=T, L=len(content(name)), **names)]
    distinct = len({(doc, t, length) for doc, t, _, length in spans})
    assert distinct < len(spans)
    assert re.search(rf"\b{len(spans):,} spans .*\b{distinct:,} distinct", warning_of(task))
    assert "learned" in warning_of(task)
    assert not warning_of(task_of(place, *overrides, "splice.balance_mode=by_coverage", "model.positions=learned"))


@settings(max_examples=60)
@given(schedules(), st.lists(st.integers(2, 20), min_size=1, max_size=4))
def test_distinct_spans_are_counted(schedule, lengths):
    S, options = schedule
    found = [(i, *span) for i, L in enumerate(lengths) for span in naive_spans(S=S, L=L, **options)]
    assume(found)
    dataset = MultiSpliceDocumentDataset(S=S, doc_tokens_list=documents(lengths), pad_token_id=NULL, **options)
    assert len(dataset) == len(found)
    assert int(dataset.layouts.distinct().sum()) == len({(doc, t, length) for doc, t, _, length in found})


def test_without_a_sweep_there_is_no_warning(place):
    assert not warning_of(task_of(place))
    assert not warning_of(task_of(place, "splice.content_length=8", "splice.balance_mode=by_document"))
    assert not warning_of(task_of(place, "splice.content_start_mode=slide_within", f"splice.offset_stride={T}"))


def test_jitter_has_no_effect_under_rope(place):
    assert "offset_jitter=3" in warning_of(task_of(place, "splice.content_length=8", "splice.offset_jitter=3"))
    learned = task_of(place, "splice.content_length=8", "splice.offset_jitter=3", "model.positions=learned")
    assert not warning_of(learned)


def saved(task):
    """The saving that the note on packing gives, or None."""
    (line,) = [line for line in task.notes() if line.startswith("packed")] or [None]
    return None if line is None else float(re.search(r"([\d.]+)\s+times", line)[1])


@pytest.mark.parametrize(("K", "rows"), [(8, 12), (24, 4), (14, 6)])
def test_the_saving_of_packing_is_noted(place, K, rows):
    """The ratio of tokens computed, against one frame of T tokens per span."""
    overrides = [f"splice.content_length={K}", f"train.B={rows}", "splice.balance_mode=by_coverage"]
    task = task_of(place, *overrides)
    ratio = rows * T / task.batch(0).x.numel()
    if ratio == 1:
        assert saved(task) in (None, 1.0)
    else:
        assert saved(task) == pytest.approx(ratio, abs=0.051)
    assert saved(task_of(place, *overrides, "splice.packed=false")) is None


def test_the_size_of_the_dataset_is_noted(place):
    read, size, *_ = task_of(place, "splice.content_length=10", "splice.balance_mode=by_coverage").notes()
    assert "14 notes" in read
    lengths = [len(content(name)) for name in CHOSEN]
    total = sum(length - 9 for length in lengths)
    for part in ("3 documents", f"{min(lengths)} to {max(lengths)} tokens", f"{total} examples", "3 held-out controls"):
        assert part in size
    one = task_of(place, "splice.doc_index=0", "splice.controls=1").notes()[1]
    assert "1 document of" in one
    assert "1 held-out control" in one


# --- prompts -----------------------------------------------------------------------------------------


def test_samples_continue_the_first_document(place):
    text = NOTES[CHOSEN[0]].encode("utf-8")
    assert len(text) > 64
    wanted = text[:32].decode("utf-8", errors="ignore")
    assert task_of(place, "splice.sampler=stream", "splice.curriculum=3").sample_prompt() == wanted


def test_a_prompt_is_at_most_half_of_a_document(tmp_path):
    write_notes(tmp_path, {f"{i}.md": "äöü" for i in range(4)})  # six bytes: the cut is within ö
    assert task_of(tmp_path, "splice.num_docs=1").sample_prompt() == "ä"


def test_a_prompt_of_tokens():
    task = token_task()
    ids = task.documents.train.ids(task.chosen[0]).tolist()
    assert task.sample_prompt() == token_caches.tokenizer().decode(ids[: min(32, len(ids) // 2)])


# --- what is rejected ----------------------------------------------------------------------------------------

REJECTED = [
    (["splice.content_stride=0"], ["content_stride", "0"]),
    (["splice.num_docs=0"], ["num_docs", "0"]),
    (["splice.num_docs=99"], ["num_docs=99", str(len(PARTS["train"]))]),
    (["splice.min_doc_length=5000"], ["num_docs=3", "only 0", "5,000"]),
    (["splice.min_copy_len=500", "model.T=512"], ["500", str(len(content(CHOSEN[0])))]),
    (["splice.adaptive_k=false", "splice.content_length=500", "model.T=512"], ["500", "adaptive_k"]),
    (["splice.doc_weights=[1.0, 2.0]"], ["doc_weights", "2", "3 documents"]),
    (["splice.groups=author"], ["groups", "author"]),
    (["splice.doc_index=500"], ["doc_index=500", str(len(PARTS["train"]))]),
    (["splice.alpha=0.5", "splice.content_start_mode=anchor_start"], ["alpha", "anchor_start"]),
    (["splice.alpha=[0.5, 0.1]"], ["alpha", "2", "3 documents"]),
    (["splice.content_stride=[1, 2]"], ["content_stride", "2", "3 documents"]),
    (["splice.shuffle_offsets=3", "splice.offset_seed=4"], ["shuffle_offsets=3", "offset_seed=4"]),
    (["splice.content_seed=4"], ["content_seed=4", "shuffle_content"]),
    (["splice.shuffle_content=true", "splice.sampler=stream"], ["shuffle_content", "stream"]),
    (["splice.curriculum=0"], ["curriculum", "0"]),
    (["splice.restrict_to_training_subset=true", "splice.max_train_tokens=3"], ["3 tokens"]),
    (["splice.eval_examples=0"], ["eval_examples", "0"]),
    (["splice.dataset_name=books"], ["books", "roam"]),
    (["model.V=300"], ["model.V=300", "256"]),
]


@pytest.mark.parametrize(("overrides", "named"), REJECTED)
def test_invalid_options_are_rejected_with_their_values(place, overrides, named):
    with pytest.raises(ValueError, match=re.escape(named[0])) as err:
        task_of(place, *overrides)
    message = str(err.value)
    for fact in named:
        assert fact in message, message
    assert "\n" not in message


@pytest.mark.parametrize("split", ["train", "val"])
def test_ids_past_the_vocabulary(tmp_path, split):
    """Changed bytes in a file of the same size, in a document that is trained on, or in a control."""
    root = token_caches.copy_to(tmp_path / "caches")
    sound = token_task(f"data.token_cache={root}", "splice.num_docs=1", "splice.controls=1")
    number = (sound.chosen if split == "train" else sound.controls)[0]
    split_documents = sound.documents.train if split == "train" else sound.documents.held_out
    place = int(split_documents.ends[number] - split_documents.lengths[number]) + 3
    for path in sorted((root / "pretrain" / "fineweb_edu" / split).glob("*.bin")):
        tokens = np.fromfile(path, dtype="<u2")
        if 0 <= place < len(tokens):
            tokens[place] = 65_000
            tokens.tofile(path)
        place -= len(tokens)
    token_caches.forget_checksums("pretrain", "fineweb_edu", root)
    overrides = [f"data.token_cache={root}", f"splice.content_length={T}"]
    facts = rf"document {number} of .*fineweb_edu/{split} .*65000.*cache verify"
    if split == "val":
        with pytest.raises(ValueError, match=facts):
            token_task(*overrides, "splice.num_docs=1", "splice.controls=1")  # it is read for comparison
        return
    task = token_task(*overrides, "splice.num_docs=1", "splice.controls=0")
    reads = [lambda: [task.batch(step) for step in range(40)], task.sample_prompt]
    for read in (*reads, lambda: token_task(*overrides, "splice.doc_key=a")):
        with pytest.raises(ValueError, match=facts):
            read()


@pytest.mark.parametrize(("name", "value"), [("pad_token_id", -1), ("pad_token_id", 256), ("eos_token_id", 256)])
def test_a_filler_outside_the_vocabulary_is_rejected(place, name, value):
    with pytest.raises(ValueError, match=rf"splice\.{name} .*0 .*255.* {value}"):
        task_of(place, f"splice.{name}={value}")
    assert task_of(place, f"splice.{name}=255").dataset.pad_token_id in (0, 255)


def test_a_vocabulary_that_is_not_the_tokenizers_is_rejected():
    vocabulary = token_caches.tokenizer().vocab_size
    with pytest.raises(ValueError, match=rf"model\.V=256.*{vocabulary} ids"):
        token_task("model.V=256")


def test_too_few_documents_are_filled_up_on_request(place):
    task = task_of(place, "splice.num_docs=3", "splice.min_doc_length=5000", "splice.strict_num_docs=false")
    assert [task.documents.train.name(i) for i in task.chosen] == CHOSEN


# --- configs -----------------------------------------------------------------------------------------


# --- runs --------------------------------------------------------------------------------


def losses(run):
    return [line["loss"] for line in run.metrics()]


def test_packed_and_unpacked_runs_have_the_same_losses(place, tmp_path):
    runs = {}
    for packed in ("true", "false"):
        overrides = [f"splice.packed={packed}", "train.accumulate=3"]
        runs[packed] = RunFolder(tmp_path / packed)
        result = train(config_of(place, *SWEEP, *overrides, "output.checkpoint_every=6"), runs[packed])
    assert losses(runs["true"]) == pytest.approx(losses(runs["false"]), abs=1e-4)
    assert len(losses(runs["true"])) == 6
    evals = [run.metrics()[-1]["evals"] for run in runs.values()]
    assert evals[0] == pytest.approx(evals[1], abs=1e-3)
    assert result.evals == evals[1] and {f"bpb/{name}" for name in CHOSEN} <= evals[1].keys()
    assert result.best["loss"] == min(line["evals"]["splice"] for line in runs["false"].metrics() if "evals" in line)
    assert all(line["supervised_per_s"] > 0 for line in runs["true"].metrics())
    weights = [torch.load(run.latest, weights_only=True)["model"] for run in runs.values()]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=0, atol=2e-3)


def test_three_documents_are_memorized(tmp_path):
    """A tiny model, eighty steps: trained documents have a much lower loss than held-out ones."""
    texts = [" ".join(token_caches.words(101 * i + 7 * j, 1) for j in range(14)) for i in range(8)]
    write_notes(tmp_path, {f"{i}.md": text for i, text in enumerate(texts)})
    sizes = ["model.T=64", "model.C=48", "model.H=4", "model.L=1", "train.B=8", "train.total_steps=80"]
    schedule = ["train.base_lr=3e-2", "train.warmup_steps=10", "train.optimizer=muon"]
    outputs = ["output.eval_every=80", "output.checkpoint_every=80"]
    config = config_of(tmp_path, *sizes, *schedule, *outputs, "splice.content_length=32", "splice.balance_tau=0.0")
    task = SpliceTask(config)
    assert (len(task.chosen), len(task.controls)) == (3, 2)
    run = RunFolder(tmp_path / "run")
    result = train(config, run, task=task)
    assert np.mean(losses(run)[:5]) > 4
    known = [result.evals[f"loss/{name}"] for name in task.names]
    controls = [value for key, value in result.evals.items() if key.startswith("loss/control")]
    assert len(controls) == 2
    assert max(known) < min(1, 0.3 * min(controls))


def test_documents_are_chosen_by_their_text(tmp_path):
    texts = [f"note {i}: " + "words " * (10 + i) + ("a naïve thought" if i % 5 == 2 else "") for i in range(20)]
    write_notes(tmp_path, {f"{i:02}.md": text for i, text in enumerate(texts)})
    options = ["splice.doc_key=naïve", "splice.controls=0", "splice.num_docs=2"]
    task = task_of(tmp_path, *options)
    held_out = {task.documents.held_out.name(i) for i in range(len(task.documents.held_out.lengths))}
    having = [f"{i:02}.md" for i in (17, 12, 7, 2) if f"{i:02}.md" not in held_out]
    assert task.names == having[:2]  # the longest of those that contain it
    with pytest.raises(ValueError, match=r"doc_key.*'nowhere'"):
        task_of(tmp_path, *options, "splice.doc_key=nowhere")
    other = next(i for i in range(len(task.documents.train.lengths)) if task.documents.train.name(i) not in having)
    with pytest.raises(ValueError, match=rf"doc_index={other}\b.*'naïve'"):
        task_of(tmp_path, *options, f"splice.doc_index={other}")


def test_epochs_set_the_steps(place):
    config = config_of(place, "splice.epochs=2.5", "train.B=4")
    examples = len(SpliceTask(config).dataset)
    derived = with_steps_of_epochs(config)
    assert derived.train.total_steps == math.ceil(2.5 * examples / 4)
    assert derived.train.warmup_steps < derived.train.total_steps
    assert any(f"{derived.train.total_steps:,} steps" in note for note in SpliceTask(derived).notes())
    assert with_steps_of_epochs(config_of(place)) == config_of(place)


@pytest.mark.parametrize(
    ("set_", "replaced"),
    [
        ([], []),
        (["train.total_steps=50"], ["train.total_steps=50"]),
        (["train.total_steps=5000"], ["train.total_steps=5000"]),
        (["train.total_steps=5000", "train.warmup_steps=4000"], ["train.total_steps=5000", "instead of 4000"]),
        (["train.total_steps=5000", "train.warmup_steps=7"], ["train.total_steps=5000"]),
    ],
)
def test_the_warm_up_belongs_to_the_steps_of_the_epochs(place, set_, replaced):
    """A tenth of the derived steps, unless it is set and fits; what is replaced is reported."""
    sizes = ["task=splice", f"model.T={T}", "model.C=16", "model.L=1", "model.H=2", "splice.num_docs=3", "train.B=4"]
    paths = [f"data.roam={place / 'notes'}", f"data.cache_dir={place / 'streams'}", "data.roam_val_frac=0.3"]
    notes = []
    config = load_config(None, overrides=[*sizes, *paths, "splice.epochs=3", *set_])
    train = with_steps_of_epochs(config, notes).train
    assert 20 < train.total_steps < 1000
    assert train.warmup_steps == (7 if "train.warmup_steps=7" in set_ else train.total_steps // 10)
    assert len(notes) == len(replaced) and all(text in note for text, note in zip(replaced, notes, strict=True))
    again = []
    assert with_steps_of_epochs(dataclasses.replace(config, train=train), again).train == train
    assert again == []  # as a run that is resumed


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["splice.epochs=0"], ["epochs", "0"]),
        (["splice.epochs=1", "splice.curriculum=3"], ["epochs", "curriculum"]),
        (["splice.epochs=1", "splice.restrict_to_training_subset=true"], ["epochs", "max_train_batches"]),
        (["splice.tokenizer=x"], ["splice.tokenizer", "documents=tokens"]),
        (["splice.base=x"], ["splice.base", "documents=tokens"]),
        (["splice.k_t=2"], ["k_t", "content_stride"]),
        (["splice.doc_selector=x"], ["doc_selector", "min_doc_length"]),
        (["splice.rng_key=1"], ["rng_key", "set seed"]),
        (["splice.key=1"], ["splice has no key", "set seed"]),
        (["splice.global_seed=1"], ["global_seed", "set seed"]),
        (["splice.text_key=text"], ["text_key", "cache build"]),
        (["splice.min_len=9"], ["min_len", "min_doc_length"]),
        (["splice.hash=9"], ["hash", "doc_select_mode"]),
        (["splice.batch_schedule=9"], ["batch_schedule", "train.B"]),
        (["splice.base={type: mixture}"], ["splice.base", "folder", "niels_gpt.levanter.train_lm"]),
        (["data.type=splice_multi_document"], ["data.type", "task: splice", "niels_gpt.levanter.train_lm"]),
        (["type=splice_multi_document"], ["unknown key type", "task: splice"]),
        (["data.min_doc_length=1024"], ["data.min_doc_length", "splice.min_doc_length"]),
        (["num_docs=3"], ["num_docs", "splice.num_docs"]),
    ],
)
def test_options_of_the_specification_that_do_not_fit(place, overrides, named):
    with pytest.raises(ValueError) as error:
        task_of(place, *overrides)
    assert all(word in str(error.value) for word in named)


def test_the_training_subset_of_the_run_itself(place):
    """Without batches of its own, the subset has the tokens of the run: total_steps * B * T."""
    limits = ["splice.restrict_to_training_subset=true", "splice.num_docs=1", "train.total_steps=3", "train.B=2"]
    task = task_of(place, *limits)
    T = task.config.model.T
    explicit = task_of(place, "splice.restrict_to_training_subset=true", "splice.num_docs=1",
                       f"splice.max_train_tokens={3 * 2 * T}")  # fmt: skip
    assert task.chosen == explicit.chosen
    assert int(task.documents.train.ends[task.chosen[0]]) <= 3 * 2 * T


@pytest.mark.parametrize("option", ["eos_before_span", "trailing_segment_zero"])
def test_options_of_the_filler_are_not_packed_away(place, option):
    options = [f"splice.{option}=true", "splice.content_length=8", "splice.eos_token_id=3"]
    assert task_of(place, "splice.content_length=8").packed
    assert not task_of(place, *options).packed
    with pytest.raises(ValueError, match=rf"splice.{option}.*splice.packed=true"):
        task_of(place, *options, "splice.packed=true")


def test_limits_of_a_subset_without_effect_are_reported_once(place, caplog):
    task_of(place, "splice.initial_batch_size=128")
    assert sum("splice.initial_batch_size=128" in record.getMessage() for record in caplog.records) == 1
