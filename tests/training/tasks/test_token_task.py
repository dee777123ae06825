"""Tasks over token caches, against batches and losses computed by hand from the token files."""

import dataclasses
import hashlib
import itertools
import math
import re

import numpy as np
import pytest
import torch

from niels_gpt.cache.formats import CacheError
from niels_gpt.config import ModelConfig
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import load_model, save_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system.rng import generator
from niels_gpt.training.loop import train
from niels_gpt.training.tasks.base import eval_name
from niels_gpt.training.tasks.registry import open_task
from niels_gpt.training.tasks.token_task import verify_caches, with_vocabulary
from niels_gpt.training.throughput import ThroughputMeter
from tests import token_caches
from tests.token_caches import small_config
from tests.training import Crash, crash_at, metric_lines, weights_sha256

T, B = 16, 6
TEXTS = {"fineweb_edu": 0.6, "roam": 0.4}
TALKS = {"oasst1": 0.5, "dolly15k": 0.3, "primer": 0.2}
SHARES = {"pretrain": f"train.p_train={TEXTS}", "sft": f"train.p_train={TALKS}"}


@pytest.fixture(scope="module")
def pretrain():
    return open_task(small_config("pretrain", SHARES["pretrain"]))


@pytest.fixture(scope="module")
def sft():
    return open_task(small_config("sft", SHARES["sft"]))


@pytest.fixture(scope="module")
def tasks(pretrain, sft):
    return {"pretrain": pretrain, "sft": sft}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPT(small_config("pretrain").model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    return model


def candidates(kind, name, split="train", root=None):
    """(offset or index, x, targets) of every window or usable example."""
    if kind == "pretrain":
        return [(at, ids[:-1], ids[1:]) for at, ids in token_caches.windows(name, split, T, root)]
    talks = token_caches.examples(name, split, root)
    return [(i, *token_caches.sft_row(talks[i], T)) for i in token_caches.usable(talks, T)]


def drawn_rows(kind, shares, step, seed=7, root=None):
    """(cache, index, x, targets) of every row of a step: one draw for the caches, then one for the rows of each."""
    draw = torch.Generator().manual_seed(_seed_of(seed, step))
    names = [name for name, share in shares.items() if share]
    p = torch.tensor([shares[name] for name in names], dtype=torch.float32)
    chosen = [names[i] for i in torch.multinomial(p, B, replacement=True, generator=draw).tolist()]
    rows = {}
    for name in names:
        if name in chosen:
            pool = candidates(kind, name, root=root)
            picks = torch.randint(0, len(pool), (chosen.count(name),), generator=draw).tolist()
            rows[name] = iter([(name, *pool[i]) for i in picks])
    return [next(rows[name]) for name in chosen]


def _seed_of(seed, step):
    digest = hashlib.blake2b(f"{seed}:batch:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


# --- batches -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shares"), [("pretrain", TEXTS), ("sft", TALKS)])
def test_a_batch_is_drawn_by_shares_and_read_from_the_token_files(tasks, kind, shares):
    """It depends on the seed and the step alone."""
    other = open_task(small_config(kind, SHARES[kind], "train.seed=8", "train.base_lr=1.0", "model.C=32"))
    for task, seed, step in ((tasks[kind], 7, 77), (tasks[kind], 7, 0), (other, 8, 0)):
        rows = drawn_rows(kind, shares, step, seed)
        batch = task.batch(step)
        assert batch.x.dtype == batch.targets.dtype == torch.int64
        assert batch.x.tolist() == [x for _, _, x, _ in rows]
        assert batch.targets.tolist() == [targets for _, _, _, targets in rows]
        assert [origin.source for origin in task.origins(step)] == [name for name, *_ in rows]


def test_no_global_generator_is_used(tasks, model, random_states):
    before = random_states()
    for task in tasks.values():
        task.batch(0)
        task.origins(0)
        task.evaluate(model, "cpu")
    assert random_states() == before


def test_a_cache_with_share_0_is_not_needed():
    task = open_task(small_config("pretrain", "train.p_train={fineweb_edu: 1.0, elsewhere: 0.0}"))
    assert {origin.source for step in range(5) for origin in task.origins(step)} == {"fineweb_edu"}
    assert set(task.fingerprint()) == {"fineweb_edu", "tokenizer"}
    rows = drawn_rows("pretrain", {"fineweb_edu": 1.0}, 2)
    assert task.batch(2).x.tolist() == [x for _, _, x, _ in rows]


# --- what identifies the data ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_the_fingerprint_depends_on_training_tokens_and_tokenizer(tasks, kind, tmp_path):
    names = list({"pretrain": TEXTS, "sft": TALKS}[kind])
    before = tasks[kind].fingerprint()
    assert set(before) == {*names, "tokenizer"}
    model_file = (token_caches.folder() / "tokenizer" / "spm.model").read_bytes()
    assert before["tokenizer"] == hashlib.sha256(model_file).hexdigest()
    settings = ["train.seed=8", "train.B=2", "model.T=12"]
    assert open_task(small_config(kind, SHARES[kind], *settings)).fingerprint() == before
    root = token_caches.copy_to(tmp_path / "caches")
    assert open_task(small_config(kind, SHARES[kind], root=root)).fingerprint() == before  # at any path
    if kind == "pretrain":
        texts = token_caches.documents(names[1])
        texts[-1] = texts[-1].replace("the", "so")
        assert texts != token_caches.documents(names[1])
        token_caches.build_pretrain(root, names[1], token_caches.tokenizer(), texts)
    else:
        token_caches.build_sft(root, names[1], token_caches.tokenizer(), token_caches.chats(names[1])[:-1])
    after = open_task(small_config(kind, SHARES[kind], root=root)).fingerprint()
    assert [name for name in before if after[name] != before[name]] == [names[1]]


def test_the_fingerprint_does_not_depend_on_held_out_documents(pretrain, tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    texts = token_caches.documents("fineweb_edu")
    first, second, third, *rest = texts[0].split(" ")  # the first documents are held out
    texts[0] = " ".join((first, third, second, *rest))
    token_caches.build_pretrain(root, "fineweb_edu", token_caches.tokenizer(), texts)
    assert token_caches.stream("fineweb_edu", "val", root) != token_caches.stream("fineweb_edu", "val")
    assert token_caches.stream("fineweb_edu", "train", root) == token_caches.stream("fineweb_edu", "train")
    assert open_task(small_config("pretrain", SHARES["pretrain"], root=root)).fingerprint() == pretrain.fingerprint()


# --- what is rejected ---------------------------------------------------------------------------------


def rejection(kind, *overrides, root=None):
    """The error message, which is one line."""
    with pytest.raises(ValueError) as error:
        open_task(small_config(kind, *overrides, root=root))
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("kind", "override", "facts"),
    [
        ("pretrain", "model.V=405", ["model.V=405", "404"]),
        ("sft", "model.V=405", ["model.V=405", "404"]),
        ("sft", "train.p_train={roam: 1.0}", ["roam"]),  # a cache of the other kind
        ("pretrain", "train.p_train={primer: 1.0}", ["primer"]),
        ("pretrain", "model.T=700", ["701", "fineweb_edu"]),  # longer than every shard
        ("sft", "model.T=1", ["T"]),  # no conversation has a target within the window
    ],
)
def test_options_that_do_not_fit_the_caches(kind, override, facts):
    message = rejection(kind, override)
    assert all(fact in message for fact in facts), message


@pytest.mark.parametrize(("kind", "option"), [("pretrain", "p_train"), ("sft", "p_val")])
def test_a_missing_cache(kind, option):
    there = next(iter({"pretrain": TEXTS, "sft": TALKS}[kind]))
    message = rejection(kind, SHARES[kind], f"train.{option}={{gone: 0.5, {there}: 0.5}}")
    existing = token_caches.PRETRAIN if kind == "pretrain" else token_caches.SFT
    assert all(fact in message for fact in (f"train.{option}", "niels-gpt cache build gone", *existing))


def test_a_missing_folder(tmp_path):
    message = rejection("sft", root=tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message and "niels-gpt cache build-all" in message
    with pytest.raises(ValueError, match="nowhere"):
        with_vocabulary(small_config("sft", root=tmp_path / "nowhere"))


def test_a_placeholder_is_not_a_cache(tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    token_caches.change_meta("pretrain", "roam", root, built=False, reason="not reachable")
    message = rejection("pretrain", root=root)
    assert "roam" in message and "fineweb_edu" in message


@pytest.mark.parametrize(("kind", "name"), [("pretrain", "roam"), ("sft", "primer")])
def test_a_cache_of_another_tokenizer(kind, name, tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    other = token_caches.other_tokenizer()
    assert other.vocab_size == token_caches.tokenizer().vocab_size
    {"pretrain": token_caches.build_pretrain, "sft": token_caches.build_sft}[kind](root, name, other)
    message = rejection(kind, root=root)
    assert str(root / kind / name) in message and "tokenizer" in message


@pytest.mark.parametrize(
    ("kind", "file", "damage"),
    [("pretrain", "pretrain/roam/train/shard_00000.bin", "cut"), ("sft", "sft/primer/train_tokens.bin", "gone")],
)
def test_a_damaged_cache(kind, file, damage, tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    if damage == "cut":
        (root / file).write_bytes((root / file).read_bytes()[:-4])
    else:
        (root / file).unlink()
    assert str(root / file) in rejection(kind, root=root)


@pytest.mark.parametrize(
    ("kind", "file", "shares"),
    [
        ("pretrain", "pretrain/roam/train/shard_00000.bin", "roam"),
        ("pretrain", "pretrain/fineweb_edu/val/shard_00000.bin", "fineweb_edu"),
        ("sft", "sft/primer/train_tokens.bin", "primer"),
        ("sft", "sft/primer/val_tokens.bin", "primer"),
        ("sft", "pretrain/roam/val/shard_00000.bin", "primer"),  # what is retained
    ],
)
def test_ids_past_the_vocabulary(kind, file, shares, tmp_path):
    """Changed bytes in a file of the same size: every second token, so that every row has some."""
    root = token_caches.copy_to(tmp_path / "caches")
    tokens = np.fromfile(root / file, dtype="<u2")
    tokens[4::2] = 65_535 if kind == "pretrain" else np.where(tokens[4::2] < 300, 60_000, tokens[4::2])
    tokens.tofile(root / file)
    with pytest.raises(CacheError, match="differ from their checksum"):
        read_file(root, kind, file, shares)
    token_caches.forget_checksums(*file.split("/")[:2], root)
    with pytest.raises(ValueError, match=r"65535|60000") as err:
        read_file(root, kind, file, shares)
    assert re.fullmatch(rf"(?=.*{root / file})(?=.*403).*niels-gpt cache verify.*", str(err.value))  # one line


def read_file(root, kind, file, shares):
    """Train or evaluate on the rows of a file."""
    only = f"{{{shares}: 1.0}}"
    overrides = [f"train.p_train={only}", f"train.p_val={only}", "data.retain={roam: 1.0}"]
    task = open_task(token_caches.small_config(kind, *overrides, root=root))
    if "/train" in file:
        task.batch(0)
    else:
        task.evaluate(GPT(task.config.model), "cpu")


@pytest.mark.parametrize(("kind", "name"), [("pretrain", "roam"), ("sft", "primer")])
def test_a_cache_rebuilt_during_training_is_not_read(kind, name, tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    shares = [f"train.{option}={{{name}: 1.0}}" for option in ("p_train", "p_val")]
    task, other = (open_task(token_caches.small_config(kind, *shares, root=root)) for _ in range(2))
    wanted = [other.batch(step).x.tolist() for step in range(5)]
    fingerprint = other.fingerprint()
    build = {"pretrain": token_caches.build_pretrain, "sft": token_caches.build_sft}[kind]
    build(root, name, token_caches.other_tokenizer())
    assert [task.batch(step).x.tolist() for step in range(5)] == wanted
    assert task.fingerprint() == fingerprint


def test_a_cache_without_weight_in_the_validation_loss_is_verified_too(tmp_path):
    root = token_caches.copy_to(tmp_path / "caches")
    shares = ["train.p_train={roam: 0.5, fineweb_edu: 0.5}", "train.p_val={roam: 1.0, fineweb_edu: 0.0}"]
    config = small_config("pretrain", *shares, root=root)
    verify_caches(config)
    file = root / "pretrain/fineweb_edu/train/shard_00000.bin"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CacheError, match="fineweb_edu"):
        verify_caches(config)


def test_with_vocabulary_sets_the_size_of_the_tokenizer(tmp_path):
    config = small_config("sft", "model.V=17")
    assert with_vocabulary(config) == dataclasses.replace(config, model=dataclasses.replace(config.model, V=404))
    bytes_ = dataclasses.replace(config, task="bytes")
    assert with_vocabulary(bytes_) is bytes_


# --- evaluation --------------------------------------------------------------------------------------


def held_out_loss(model, kind, name, *, steps=2, seed=7, root=None):
    """The mean over all targets of the rows that are drawn for a held-out cache."""
    draw = generator(seed, "eval", name)
    pool = candidates(kind, name, "val", root)
    losses = []
    for _ in range(steps):
        rows = [pool[i] for i in torch.randint(0, len(pool), (B,), generator=draw).tolist()]
        losses += token_caches.nats(model, [x for _, x, _ in rows], [targets for _, _, targets in rows])
    return math.fsum(losses) / len(losses)


@pytest.mark.parametrize("p_val", [None, {"roam": 1.0, "fineweb_edu": 0.0}])
def test_evaluation_of_pretraining(model, p_val):
    task = open_task(small_config("pretrain", SHARES["pretrain"], *([f"train.p_val={p_val}"] if p_val else [])))
    model.train()
    losses, value = task.evaluate(model, "cpu")
    assert model.training
    assert task.evaluate(model, "cpu") == (losses, value)  # on the same rows
    weights = {name: share for name, share in (p_val or TEXTS).items() if share}
    assert set(losses) == {*(f"val_{name}" for name in weights), "val_pretrain"}
    model.eval()  # no dropout
    expected = {name: held_out_loss(model, "pretrain", name) for name in weights}
    for name, loss in expected.items():
        assert losses[f"val_{name}"] == pytest.approx(loss, rel=1e-5)
    mean = math.fsum(weights[name] * loss for name, loss in expected.items())
    assert losses["val_pretrain"] == value == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize("retain", [None, {"roam": 0.25, "fineweb_edu": 0.75}])
def test_evaluation_of_sft_and_of_retained_caches(model, retain):
    extra = [f"data.retain={retain}"] if retain else []
    task = open_task(small_config("sft", SHARES["sft"], *extra))
    losses, value = task.evaluate(model, "cpu")
    assert task.evaluate(model, "cpu") == (losses, value)
    assert set(losses) == {"val_oasst1", "val_dolly15k", "val_chat", "val_sft", "val_pretrain"}
    was, _ = model.training, model.eval()
    expected = {name: held_out_loss(model, "sft", name) for name in TALKS}
    for name, loss in expected.items():
        assert losses[eval_name(name)] == pytest.approx(loss, rel=1e-5)
    mean = math.fsum(TALKS[name] * loss for name, loss in expected.items())
    assert losses["val_sft"] == value == pytest.approx(mean, rel=1e-5)  # chooses the best checkpoint
    weights = retain or {"fineweb_edu": 0.95, "roam": 0.05}
    kept = math.fsum(weights[name] * held_out_loss(model, "pretrain", name) for name in weights)
    assert losses["val_pretrain"] == pytest.approx(kept, rel=1e-5)
    model.train(was)


def test_retained_caches_that_are_missing(model):
    """The weights of the existing ones are normalized; without any there is no val_pretrain."""
    model.eval()
    task = open_task(small_config("sft", "data.retain={gone: 0.5, roam: 0.5}"))
    losses, _ = task.evaluate(model, "cpu")
    assert losses["val_pretrain"] == pytest.approx(held_out_loss(model, "pretrain", "roam"), rel=1e-5)
    for retain in ("{gone: 1.0}", "{}"):
        losses, _ = open_task(small_config("sft", f"data.retain={retain}")).evaluate(model, "cpu")
        assert "val_pretrain" not in losses
        assert "val_sft" in losses


# --- origins --------------------------------------------------------------------------------------


def rendered(ids):
    """Readable text: special tokens by name, the rest decoded between them."""
    names = {token_caches.special(name): f"<{name}> " for name in ("sys", "usr", "asst")}
    names[token_caches.special("eot")] = "<eot>\n"
    text = ""
    for is_special, run in itertools.groupby(ids, lambda token: token in names):
        run = list(run)
        text += "".join(names[token] for token in run) if is_special else token_caches.tokenizer().decode(run)
    return text


def test_origins_of_pretraining_name_the_document_and_offset(pretrain):
    tokenizer, eot = token_caches.tokenizer(), token_caches.special("eot")
    streams = {name: token_caches.stream(name) for name in TEXTS}
    # The documents of the training stream end with EOT. The rest of a document that filled the held-out budget was
    # discarded.
    documents = {}
    for name, stream in streams.items():
        ends = [at + 1 for at, token in enumerate(stream) if token == eot]
        documents[name] = [stream[begin:end] for begin, end in itertools.pairwise([0, *ends])]
        assert {tokenizer.decode(ids[:-1]) for ids in documents[name]} <= set(token_caches.documents(name))
    crossing = 0
    for step in range(40):
        for origin, ids in zip(pretrain.origins(step), pretrain.batch(step).x.tolist(), strict=True):
            assert streams[origin.source][origin.stream_offset :][:T] == ids
            number = re.fullmatch(r"document (\d+)", origin.document)[1]
            document = documents[origin.source][int(number)]
            assert 0 <= origin.offset < len(document)
            here = document[origin.offset :]
            assert here[:T] == ids[: len(here)]
            assert origin.stream_offset == sum(map(len, documents[origin.source][: int(number)])) + origin.offset
            assert origin.text == rendered(ids)
            crossing += len(here) < T
    assert crossing > 20


def test_origins_of_sft_name_the_example(sft):
    for step in range(20):
        rows = sft.origins(step)
        assert [origin.row for origin in rows] == list(range(B))
        for origin, x in zip(rows, sft.batch(step).x.tolist(), strict=True):
            talks = token_caches.examples(origin.source)
            number = re.fullmatch(r"example (\d+)", origin.document)[1]
            ids = talks[int(number)]
            assert ids[:T] == x[: len(ids)]
            assert origin.offset == 0
            assert origin.stream_offset == sum(map(len, talks[: int(number)]))
            assert origin.text == rendered(ids[:T])
            assert origin.text.startswith(("<usr> ", "<sys> "))


# --- the table of sources ----------------------------------------------------------------------------


def test_sources_are_described(pretrain, sft):
    rows = {row.source: row for row in pretrain.describe()}
    assert set(rows) == set(TEXTS)
    for name, row in rows.items():
        sizes = [len(token_caches.stream(name, split)) for split in ("train", "val")]
        folder = token_caches.folder() / "pretrain" / name
        number = sum(len(token_caches.read_offsets(folder / split / "documents.npy")) for split in ("train", "val"))
        assert row == (name, TEXTS[name], *sizes, " tokens", number, str(folder))
    rows = {row.source: row for row in sft.describe()}
    assert set(rows) == set(TALKS)
    for name, row in rows.items():
        talks = [token_caches.examples(name, split) for split in ("train", "val")]
        sizes = tuple(sum(map(len, split)) for split in talks)
        assert (row.share, row.train, row.held_out, row.documents) == (TALKS[name], *sizes, sum(map(len, talks)))


def test_a_cache_that_is_only_evaluated_has_share_0():
    task = open_task(small_config("pretrain", "train.p_train={fineweb_edu: 1.0}", "train.p_val={roam: 1.0}"))
    assert {row.source: row.share for row in task.describe()} == {"fineweb_edu": 1.0, "roam": 0.0}


# --- samples -----------------------------------------------------------------------------------------


def test_sample_prompts(pretrain, sft):
    ids = {name: token_caches.special(name) for name in ("sys", "usr", "asst", "eot")}
    encode = token_caches.tokenizer().encode
    assert pretrain.sample_prompt() == pretrain.config.output.sample_prompt
    assert sft.sample_prompt() == [ids["usr"], *encode("what is niels?"), ids["eot"], ids["asst"]]
    plain = open_task(small_config("sft", "output.sample_prompt=the note"))
    assert plain.sample_prompt() == [ids["usr"], *encode("the note"), ids["eot"], ids["asst"]]
    both = open_task(small_config("sft", 'output.sample_prompt="system: be so\\nuser: and then\\nassistant: "'))
    assert both.sample_prompt() == [
        *(ids["sys"], *encode("be so"), ids["eot"]),
        *(ids["usr"], *encode("and then"), ids["eot"]),
        ids["asst"],
    ]


# --- runs --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory, model):
    """A checkpoint to start from."""
    path = tmp_path_factory.mktemp("base") / "base.pt"
    save_checkpoint(path, model, None, 5, model.config)
    return path


def test_a_run_starts_from_the_weights_of_init_from(base, tmp_path):
    run = RunFolder(tmp_path / "run")
    config = small_config("sft", SHARES["sft"], f"init_from={base}", "model.dropout=0", "train.total_steps=3")
    train(config, run)
    start, _ = load_model(base)
    rows = drawn_rows("sft", TALKS, 0)
    losses = token_caches.nats(start, [x for _, _, x, _ in rows], [targets for _, _, _, targets in rows])
    first = metric_lines(run.path)[0]["loss"]
    assert first == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)
    fresh = RunFolder(tmp_path / "fresh")
    train(dataclasses.replace(config, init_from=""), fresh)
    assert metric_lines(fresh.path)[0]["loss"] != pytest.approx(first, rel=1e-2)


@pytest.mark.parametrize("other", ["V=300", "norm=rmsnorm", "H=4"])
def test_a_checkpoint_of_another_architecture(other, tmp_path):
    """Also if all weights have the same shape, as with other heads or another norm."""
    name, _, value = other.partition("=")
    fields = dataclasses.asdict(small_config("sft").model) | {"D": 0, "d_ff": 0}
    fields[name] = int(value) if value.isdigit() else value
    torch.manual_seed(1)
    path = tmp_path / "other.pt"
    save_checkpoint(path, GPT(ModelConfig(**fields)), None, 5, ModelConfig(**fields))
    run = RunFolder(tmp_path / "run")
    with pytest.raises(ValueError, match=r"other\.pt"):
        train(small_config("sft", f"init_from={path}"), run)
    assert not run.path.exists()


def test_a_longer_context_is_the_same_architecture(base, tmp_path):
    """Positions are rotations: no weight depends on T."""
    config = small_config("sft", f"init_from={base}", "model.T=24", "train.total_steps=2", "train.warmup_steps=0")
    assert train(config, tmp_path / "run").step == 2


@pytest.mark.parametrize(("kind", "after"), [("pretrain", 6), ("sft", 2)])
def test_a_crashed_run_resumes_bit_for_bit(kind, after, base, tmp_path):
    """Before the first checkpoint it starts from init_from again; after it, init_from is not needed."""
    start = tmp_path / "start.pt"
    start.write_bytes(base.read_bytes())
    config = small_config(kind, SHARES[kind], f"init_from={start}")
    full, run = RunFolder(tmp_path / "full"), RunFolder(tmp_path / "run")
    train(config, full)
    with pytest.raises(Crash):
        train(config, run, report=crash_at(after))
    if after > 4:
        start.unlink()
    train(config, run, resume=True)
    assert metric_lines(run.path) == metric_lines(full.path)
    assert weights_sha256(run.latest) == weights_sha256(full.latest)
    assert weights_sha256(run.best) == weights_sha256(full.best)


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_the_speed_counts_no_padding(kind, tasks, tmp_path, monkeypatch):
    counted, end = [], ThroughputMeter.end

    def counting(*args, tokens, **more):
        counted.append(int(tokens))
        return end(*args, tokens=tokens, **more)

    monkeypatch.setattr(ThroughputMeter, "end", counting)
    train(small_config(kind, SHARES[kind], "train.total_steps=4"), tmp_path / "run")
    for step, tokens in enumerate(counted):
        rows = tasks[kind].batch(step).targets.tolist()
        padding = sum(len(list(itertools.takewhile(lambda target: target == -100, reversed(row)))) for row in rows)
        assert tokens == B * T - padding
        assert (padding > 0) == (kind == "sft")
    assert len(counted) == 4


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_the_run_folder_is_self_contained(kind, tmp_path):
    run = RunFolder(tmp_path / "run")
    result = train(small_config(kind), run)
    assert run.tokenizer_path.read_bytes() == (token_caches.folder() / "tokenizer" / "spm.model").read_bytes()
    names = token_caches.PRETRAIN if kind == "pretrain" else token_caches.SFT
    wanted = {*map(eval_name, names), f"val_{kind}", "val_pretrain"}
    assert set(result.evals) == wanted
    lines = metric_lines(run.path)
    assert [line["step"] for line in lines if "evals" in line] == [2, 5, 8, 11]
    assert all(set(line["evals"]) == wanted for line in lines if "evals" in line)
    best = min((line["evals"][f"val_{kind}"], line["step"] + 1) for line in lines if "evals" in line)
    assert (result.best["loss"], result.best["step"]) == best
    assert torch.load(run.best, weights_only=True)["step"] == best[1]


def sampled(model, prompt, amount, draw):
    """Text sampled at temperature 0.8 and top-k 50; each random number picks a token by cumulative probability."""
    ids, new = list(prompt), []
    for number in torch.rand(amount, generator=draw, dtype=torch.float64).tolist():
        with torch.no_grad():
            shares = (model(torch.tensor([ids[-T:]]))[0, -1].double() / 0.8).softmax(0)
        shares[shares < shares.topk(50).values[-1]] = 0.0
        reached = shares.cumsum(0) / shares.sum()
        ids.append(int((reached <= number).sum()))
        if ids[-1] == token_caches.special("eot"):
            break
        new.append(ids[-1])
    return b"".join(token_caches.tokenizer().token_bytes[i] for i in new).decode("utf-8", errors="replace")


@pytest.mark.parametrize("kind", ["pretrain", "sft"])
def test_samples_are_sampled_from_the_model(kind, tmp_path):
    run = RunFolder(tmp_path / "run")
    config = small_config(kind, "output.sample_every=6", "output.checkpoint_every=6", "output.sample_tokens=12")
    train(config, run)
    assert [path.name for path in sorted(run.samples.iterdir())] == ["step_00000006.txt", "step_00000012.txt"]
    text = "user: what is niels?\nassistant: "
    ids = token_caches.tokenizer().encode(text)
    if kind == "sft":
        ids = [*token_caches.tokenizer().encode("what is niels?"), token_caches.special("eot")]
        ids = [token_caches.special("usr"), *ids, token_caches.special("asst")]
    for step in (6, 12):
        model, _ = load_model(run.step_path(step))
        wanted = sampled(model, ids, 12, generator(7, "sample", step))
        assert wanted
        assert (run.samples / f"step_{step:08d}.txt").read_text(encoding="utf-8") == f"{text}{wanted}\n"
