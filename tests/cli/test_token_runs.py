"""Runs on token caches through the command line: train, eval, generate, chat and batch show."""

import gzip
import io
import itertools
import json
import lzma
import math
import re
import shutil
import sys

import pytest
import torch
import yaml

from niels_gpt.cache.build_cache import build_pretrain_cache
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import load_model, save_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.tokenizer import SPECIAL_TOKENS
from tests import token_caches
from tests.cli import call, error_of
from tests.token_caches import options, special, tokenizer
from tests.training import metric_lines

T = 16
FAST = [*token_caches.SMALL, "train.total_steps=4", "train.warmup_steps=0"]
SHARES = {"pretrain": "train.p_train={fineweb_edu: 0.5, roam: 0.5}", "sft": "train.p_train={oasst1: 0.5, primer: 0.5}"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with caches in the usual place and two runs: runs/base was pretrained, runs/chat tuned from it."""
    folder = tmp_path_factory.mktemp("token-runs")
    token_caches.copy_to(folder / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        base = options(["task=pretrain", *FAST, SHARES["pretrain"]])
        assert call("train", *base, "--run-dir", "runs/base") == 0
        chat = options(["task=sft", "init_from=runs/base/checkpoints/best.pt", *FAST, SHARES["sft"]])
        assert call("train", *chat, "--run-dir", "runs/chat") == 0
    return folder


@pytest.fixture(autouse=True)
def there(place, monkeypatch):
    monkeypatch.chdir(place)


def make_model():
    """Large random weights: what it says depends on all it reads. It says whole characters, and opens no turn."""
    torch.manual_seed(5)
    model = GPT({"V": 404, "T": 64, "C": 32, "L": 1, "H": 2, "dropout": 0.0})
    unsaid = [i for i, data in enumerate(tokenizer().token_bytes) if len(data) == 1 and data >= b"\x80"]
    unsaid += [special(name) for name in ("sys", "usr", "asst")]
    with torch.no_grad():
        model.tok_emb.weight.normal_()
        model.tok_emb.weight[unsaid] *= 0.01  # the head is the embedding
        for weight in model.blocks.parameters():
            if weight.dim() == 2:
                weight *= 60
    return model


@pytest.fixture(scope="module")
def checkpoint(place):
    """A checkpoint with its tokenizer in the folder above, as in a run."""
    path = place / "talker" / "checkpoints" / "m.pt"
    model = make_model()
    save_checkpoint(path, model, None, 5, model.config)
    shutil.copy(place / "cache/tokenizer/spm.model", place / "talker" / "tokenizer.model")
    return path


# --- train -------------------------------------------------------------------------------------------


def test_a_run_from_the_command_line(place, capsys):
    for kind, names in (("pretrain", ("fineweb_edu", "roam")), ("sft", ("oasst1", "primer"))):
        arguments = options([f"task={kind}", *FAST, SHARES[kind], "output.eval_every=2"])
        assert call("train", *arguments, "--print-config") == 0
        resolved = capsys.readouterr().out
        assert yaml.safe_load(resolved)["model"]["V"] == 404  # that of the tokenizer, without being told
        assert call("train", *arguments, "--run-dir", f"runs/{kind}") == 0
        output, errors = capsys.readouterr()
        assert errors == ""
        for name in names:
            assert re.search(rf"^{name} +50\.0% ", output, re.MULTILINE)
        shown = re.search(rf"^step 2/4 .*val_{kind} (\d\.\d+).*tok/s", output, re.MULTILINE)
        lines = metric_lines(place / "runs" / kind)
        assert shown[1] == f"{lines[1]['evals'][f'val_{kind}']:.3f}"
        assert "val_pretrain" in lines[1]["evals"]
        assert (place / "runs" / kind / "config.yaml").read_text(encoding="utf-8") == resolved
        assert f"niels-gpt chat --run runs/{kind}" in output
    shutil.rmtree(place / "runs/pretrain")
    shutil.rmtree(place / "runs/sft")


def test_the_tuned_model_comes_from_the_pretrained_one(place):
    base, chat = RunFolder(place / "runs/base"), RunFolder(place / "runs/chat")
    before, after = (torch.load(run.best, weights_only=True)["model"] for run in (base, chat))
    torch.manual_seed(0)
    other = GPT(chat.read_config().model).state_dict()

    def distance(a, b):
        return math.sqrt(sum(float((a[name] - b[name]).pow(2).sum()) for name in a if a[name].dim() > 1))

    assert 0 < distance(before, after) < distance(other, after) / 2


def test_training_without_caches(place, capsys):
    assert call("train", *options(["task=sft", *FAST, "data.token_cache=nowhere"]), "--run-dir", "runs/no") == 1
    message = error_of(capsys)
    assert "nowhere" in message
    assert "niels-gpt cache build-all" in message
    assert call("train", *options(["task=sft", *FAST, "train.p_train={roam: 1}"]), "--run-dir", "runs/no") == 1
    assert "no sft cache roam" in error_of(capsys)
    assert call("train", *options(["task=sft", *FAST, "init_from=gone.pt"]), "--run-dir", "runs/no") == 1
    assert "gone.pt" in error_of(capsys)
    assert not (place / "runs/no/config.yaml").exists()


def test_a_cache_whose_share_is_zero(place):
    shares = ["train.p_train={fineweb_edu: 1.0, roam: 0.0}"]
    assert call("train", *options(["task=pretrain", *FAST, *shares]), "--run-dir", place / "no-share") == 0


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("pretrain", "pretrain/roam/train/shard_00000.bin"),
        ("pretrain", "pretrain/fineweb_edu/val/shard_00000.bin"),
        ("sft", "sft/oasst1/train_tokens.bin"),
        ("sft", "pretrain/roam/val/shard_00000.bin"),  # what is retained
    ],
)
def test_damage_that_keeps_the_size_is_found_when_asked_for(tmp_path, monkeypatch, capsys, kind, file):
    monkeypatch.chdir(tmp_path)
    root = token_caches.copy_to(tmp_path / "cache")
    data = bytearray((root / file).read_bytes())
    data[10] ^= 1
    (root / file).write_bytes(data)
    run = [*options([f"task={kind}", *FAST, SHARES[kind]]), "--run-dir", "out"]
    assert call("train", *run, "--verify") == 1
    message = error_of(capsys)
    assert file in message
    assert "damaged" in message
    assert not (tmp_path / "out").exists()


def test_sound_caches_are_verified_and_used(place, tmp_path):
    run = options(["task=sft", *FAST, SHARES["sft"]])
    assert call("train", *run, "--verify", "--run-dir", tmp_path / "out") == 0


# --- eval --------------------------------------------------------------------------------------------


def stream_nats(model, ids, stride):
    """Of every token but the first, in the first window that predicts it."""
    width = min(model.config.T, len(ids) - 1)
    starts = [s for s in range(0, len(ids), stride) if s + width < len(ids)] + [len(ids) - 1 - width]
    found = {}
    for s in starts:
        for k, loss in enumerate(token_caches.nats(model, [ids[s : s + width]], [ids[s + 1 : s + width + 1]])):
            found.setdefault(s + 1 + k, loss)
    return [found[i] for i in range(1, len(ids))]


def text_bytes(ids):
    """The text itself: special tokens are none of it."""
    ends = {special(name) for name in ("sys", "usr", "asst", "eot")}
    return b"".join(tokenizer().token_bytes[i] for i in ids if i not in ends)


def check_score(score, losses, scored):
    size = len(text_bytes(scored))
    total = math.fsum(losses)
    assert (score["tokens"], score["bytes"]) == (len(losses), size)
    assert score["nats_per_token"] == pytest.approx(total / len(losses), rel=1e-5)
    assert score["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)
    assert score["perplexity"] == pytest.approx(math.exp(total / len(losses)), rel=1e-4)


def evaluated(capsys, *arguments):
    assert call("eval", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("stride", "limit"), [(None, None), (5, 90)])
def test_eval_scores_every_held_out_token(place, capsys, stride, limit):
    given = [*(["--stride", stride] if stride else []), *(["--limit", limit] if limit else [])]
    result = evaluated(capsys, "--run", "runs/base", *given)
    model, step = load_model("runs/base/checkpoints/best.pt")
    assert (result["checkpoint"], result["step"]) == ("runs/base/checkpoints/best.pt", step)
    assert result["stride"] == (stride or T)
    assert list(result["scores"]) == ["val_fineweb_edu", "val_roam"]  # it has not been tuned for chat
    for name in token_caches.PRETRAIN:
        ids = token_caches.stream(name, "val")[:limit]
        score = result["scores"][f"val_{name}"]
        check_score(score, stream_nats(model, ids, stride or T), ids[1:])
        text = text_bytes(ids)
        assert score["uniform_bits"] == 8.0
        assert score["gzip_bits"] == pytest.approx(8 * len(gzip.compress(text, 9, mtime=0)) / len(text))
        packed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
        assert score["xz_bits"] == pytest.approx(8 * len(packed) / len(text))
        train = text_bytes(token_caches.stream(name))
        unigram = sum(-math.log2((train.count(byte) + 1) / (len(train) + 256)) for byte in text) / len(text)
        assert score["unigram_bits"] == pytest.approx(unigram)


def test_eval_on_the_test_splits(place, tmp_path, capsys):
    """Of the caches that have one, and of nothing else."""
    assert call("eval", "--run", "runs/base", "--split", "test") == 1
    assert "has a test split" in error_of(capsys)
    root = token_caches.copy_to(tmp_path / "caches")
    texts = token_caches.documents("roam")
    build_pretrain_cache(
        texts[:4],
        root / "pretrain" / "wikitext",
        tokenizer=tokenizer(),
        val_texts=texts[4:6],
        test_texts=texts[6:],
        max_train_tokens=1 << 40,
        max_val_tokens=1 << 40,
        shard_bytes=200,
        seed=1,
        shuffle_buffer=None,
    )
    for run in ("base", "chat"):
        result = evaluated(capsys, "--run", f"runs/{run}", "--split", "test", "--stride", 8, "--token-cache", root)
        model, _ = load_model(f"runs/{run}/checkpoints/best.pt")
        ids = [i for text in texts[6:] for i in [*tokenizer().encode(text), special("eot")]]
        assert list(result["scores"]) == ["test_wikitext"]
        check_score(result["scores"]["test_wikitext"], stream_nats(model, ids, 8), ids[1:])


def test_eval_of_a_tuned_model_scores_the_replies_too(place, capsys):
    result = evaluated(capsys, "--run", "runs/chat")
    model, _ = load_model("runs/chat/checkpoints/best.pt")
    replies = [f"val_{name} (replies)" for name in token_caches.SFT]
    assert list(result["scores"]) == ["val_fineweb_edu", "val_roam", *replies]
    for name in token_caches.SFT:
        losses, scored = [], []
        for ids in token_caches.examples(name, "val"):
            x, targets = token_caches.sft_row(ids, T)
            losses += token_caches.nats(model, [x], [targets])
            scored += [target for target in targets if target != -100]
        check_score(result["scores"][f"val_{name} (replies)"], losses, scored)


def test_eval_table(capsys):
    scores = evaluated(capsys, "--run", "runs/chat")["scores"]
    assert call("eval", "--run", "runs/chat") == 0
    output = capsys.readouterr().out
    for name, score in scores.items():
        (line,) = [line for line in output.splitlines() if line.startswith(f"{name}  ")]
        numbers = line.removeprefix(name).split()
        assert numbers[:2] == [f"{score['bytes']:,}", f"{score['tokens']:,}"]
        assert float(numbers[2]) == pytest.approx(score["nats_per_token"], abs=6e-4)
        assert float(numbers[4]) == pytest.approx(score["bits_per_byte"], abs=6e-4)


def test_eval_of_one_checkpoint_alone(place, capsys):
    """Its tokenizer is found in the folder above, the caches in the usual place or where they are said to be."""
    whole = evaluated(capsys, "--run", "runs/base", "--limit", 60)["scores"]
    best = "runs/base/checkpoints/best.pt"
    assert evaluated(capsys, "--checkpoint", best, "--limit", 60)["scores"] == whole
    there = ["--token-cache", token_caches.folder()]
    assert evaluated(capsys, "--checkpoint", best, "--limit", 60, *there)["scores"] == whole
    assert call("eval", "--checkpoint", best, "--token-cache", "nowhere") == 1
    assert "nowhere" in error_of(capsys)


def test_eval_on_caches_of_another_tokenizer(place, tmp_path, capsys):
    root = token_caches.copy_to(tmp_path / "caches")
    other = token_caches.other_tokenizer()
    token_caches.build_pretrain(root, "roam", other)
    (root / "tokenizer/spm.model").write_bytes(other.model)
    assert call("eval", "--run", "runs/base", "--token-cache", root) == 1
    message = error_of(capsys)
    assert "another tokenizer" in message
    assert "runs/base" in message


def test_eval_does_not_score_a_cache_of_another_tokenizer(place, tmp_path, capsys):
    """Its ids mean something else: any number would be wrong."""
    root = token_caches.copy_to(tmp_path / "caches")
    token_caches.build_pretrain(root, "roam", token_caches.other_tokenizer())
    if call("eval", "--run", "runs/base", "--token-cache", root, "--limit", 60, "--json") == 0:
        assert "val_roam" not in json.loads(capsys.readouterr().out)["scores"]
    else:
        assert "roam" in error_of(capsys)


@pytest.mark.parametrize("file", ["roam/val/shard_00000.bin", "roam/train/shard_00000.bin"])
def test_eval_of_ids_past_the_vocabulary(place, tmp_path, capsys, file):
    root = token_caches.copy_to(tmp_path / "cache")
    shard = root / "pretrain" / file
    data = bytearray(shard.read_bytes())
    data[6:8] = b"\xff\xff"
    shard.write_bytes(data)
    assert call("eval", "--run", "runs/base", "--token-cache", root) == 1
    message = error_of(capsys)
    for part in (str(shard.parent), "65535", "niels-gpt cache verify"):
        assert part in message


def test_a_smaller_limit_and_a_stride_past_the_context(capsys):
    scores = evaluated(capsys, "--run", "runs/base", "--limit", 2)["scores"]
    assert {score["tokens"] for score in scores.values()} == {1}
    assert call("eval", "--run", "runs/base", "--stride", T + 1) == 1
    assert f"1..T={T}" in error_of(capsys)


# --- generate ----------------------------------------------------------------------------------------


def greedy(model, prompt, amount):
    """The ids that follow, until EOT."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(amount):
            ids.append(int(model(torch.tensor([ids[-model.config.T :]]))[0, -1].argmax()))
            if ids[-1] == special("eot"):
                return ids[len(prompt) : -1]
    return ids[len(prompt) :]


def decoded(ids):
    return b"".join(tokenizer().token_bytes[i] for i in ids).decode("utf-8", errors="replace")


PROMPTS = ["the model", "é", "so then and again " * 20]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_generate(checkpoint, capsys, prompt):
    model, _ = load_model(checkpoint)
    wanted = prompt + decoded(greedy(model, tokenizer().encode(prompt), 12))
    for cache in ("--cache", "--no-cache"):
        given = ["--checkpoint", checkpoint, "--max-tokens", 12, "--temperature", 0, cache]
        assert call("generate", prompt, *given) == 0
        assert capsys.readouterr() == (wanted + "\n", "")
        assert call("generate", prompt, *given, "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown == {"checkpoint": str(checkpoint), "prompt": prompt, "texts": [wanted]}


def test_what_is_generated_depends_on_the_prompt_and_the_seed(checkpoint, capsys):
    """Guards the tests above and below."""
    texts = set()
    for prompt in PROMPTS:
        model, _ = load_model(checkpoint)
        texts.add(decoded(greedy(model, tokenizer().encode(prompt), 12)))
    assert len(texts) == 3
    outputs = []
    for seed in (1, 1, 2):
        assert call("generate", "the", "--checkpoint", checkpoint, "--max-tokens", 20, "--seed", seed) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_several_and_stops(checkpoint, capsys):
    model, _ = load_model(checkpoint)
    free = decoded(greedy(model, tokenizer().encode("the model"), 12))
    stop = free[len(free) // 2 :][:2]
    given = ["--checkpoint", checkpoint, "--max-tokens", 12, "--temperature", 0]
    assert call("generate", "the model", *given, "--stop", stop) == 0
    assert capsys.readouterr().out == "the model" + free[: free.index(stop)] + "\n"
    assert call("generate", "the model", *given, "-n", 2) == 0
    assert capsys.readouterr().out == "".join(f"--- {i} of 2\nthe model{free}\n" for i in (1, 2))


def test_a_run_is_used_by_itself(place, capsys, tmp_path, monkeypatch):
    """Its tokenizer is in its folder: the caches are not needed."""
    shutil.copytree(place / "runs/chat", tmp_path / "runs/chat")
    monkeypatch.chdir(tmp_path)
    assert call("generate", "the", "--max-tokens", 5, "--temperature", 0) == 0  # the newest run
    output, errors = capsys.readouterr()
    assert errors == "using runs/chat\n"
    model, _ = load_model("runs/chat/checkpoints/best.pt")
    assert output == "the" + decoded(greedy(model, tokenizer().encode("the"), 5)) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n"))
    assert call("chat", "--run", "runs/chat", "--max-tokens", 5) == 0
    assert capsys.readouterr().out.startswith("niels> ")


# --- which tokenizer ---------------------------------------------------------------------------------

COMMANDS = {
    "generate": ["generate", "the", "--max-tokens", 3, "--temperature", 0],
    "chat": ["chat", "--max-tokens", 3, "--temperature", 0],
    "eval": ["eval", "--limit", 20],
}


@pytest.fixture(params=COMMANDS)
def command(request, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n"))
    return COMMANDS[request.param]


@pytest.fixture
def alone(checkpoint, tmp_path):
    """The checkpoint, with no tokenizer near it."""
    path = tmp_path / "somewhere" / "below" / "m.pt"
    path.parent.mkdir(parents=True)
    shutil.copy(checkpoint, path)
    return path


@pytest.mark.parametrize("place_of_it", [".", ".."])
def test_the_tokenizer_is_found_beside_the_checkpoint_or_above(place, alone, command, capsys, monkeypatch, place_of_it):
    shutil.copy(place / "cache/tokenizer/spm.model", alone.parent / place_of_it / "tokenizer.model")
    assert call(*command, "--checkpoint", alone) == 0
    found = capsys.readouterr()
    assert found.err == ""
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n"))
    assert call(*command, "--checkpoint", alone, "--tokenizer", "cache/tokenizer/spm.model") == 0
    assert capsys.readouterr() == found


@pytest.mark.parametrize("given", ["cache/tokenizer", "cache/tokenizer/spm.model"])
def test_the_tokenizer_is_given(alone, command, capsys, given):
    assert call(*command, "--checkpoint", alone, "--tokenizer", given) == 0
    assert capsys.readouterr().err == ""


def test_without_a_tokenizer(alone, command, capsys):
    assert call(*command, "--checkpoint", alone) == 1
    message = error_of(capsys)
    assert str(alone) in message
    assert "404" in message
    assert "--tokenizer" in message


def test_a_tokenizer_that_is_not_there_or_no_tokenizer(place, alone, command, capsys):
    assert call(*command, "--checkpoint", alone, "--tokenizer", "gone.model") == 1
    assert "gone.model" in error_of(capsys)
    (place / "noise.model").write_bytes(b"no tokenizer")
    assert call(*command, "--checkpoint", alone, "--tokenizer", "noise.model") == 1
    assert "noise.model" in error_of(capsys)


def test_a_tokenizer_of_another_size(place, tmp_path, command, capsys):
    torch.manual_seed(0)
    model = GPT({"V": 300, "T": 8, "C": 8, "L": 1, "H": 1})
    path = tmp_path / "m.pt"
    save_checkpoint(path, model, None, 1, model.config)
    assert call(*command, "--checkpoint", path, "--tokenizer", "cache/tokenizer") == 1
    message = error_of(capsys)
    assert "404" in message
    assert "300" in message


# --- chat --------------------------------------------------------------------------------------------


def chat(monkeypatch, capsys, checkpoint, *lines, given=()):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    assert call("chat", "--checkpoint", checkpoint, "--temperature", 0, "--max-tokens", 9, *given) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    return output


def answer(checkpoint, *messages):
    """The greedy reply to (role, content) messages, by the template: [role] content [eot], then [asst]."""
    model, _ = load_model(checkpoint)
    roles = {"system": "sys", "user": "usr", "assistant": "asst"}
    parts = [[special(roles[role]), *tokenizer().encode(text), special("eot")] for role, text in messages]
    return decoded(greedy(model, [*itertools.chain(*parts), special("asst")], 9))


def test_a_conversation_through_a_pipe(checkpoint, monkeypatch, capsys):
    first = answer(checkpoint, ("user", "the model"))
    second = answer(checkpoint, ("user", "the model"), ("assistant", first.strip()), ("user", "so é"))
    assert chat(monkeypatch, capsys, checkpoint, "the model", "", "  so é ") == f"niels> {first}\nniels> {second}\n"
    assert first != second


def test_system_and_reset(checkpoint, monkeypatch, capsys):
    told = answer(checkpoint, ("system", "be small"), ("user", "the note"))
    untold = answer(checkpoint, ("user", "the note"))
    assert told != untold
    lines = ["/system be small", "the note", "/reset", "/system", "the note"]
    output = chat(monkeypatch, capsys, checkpoint, *lines)
    assert output == f"(system: be small)\nniels> {told}\n(forgotten)\n(no system message)\nniels> {untold}\n"
    assert chat(monkeypatch, capsys, checkpoint, "the note", given=["--system", "be small"]) == f"niels> {told}\n"


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_special_strings_are_refused_and_forgotten(checkpoint, monkeypatch, capsys, token):
    first = answer(checkpoint, ("user", "the note"))
    output = chat(monkeypatch, capsys, checkpoint, f"hi {token}", f"/system {token}", "the note")
    assert output.count("refused") == 2
    assert output.endswith(f"niels> {first}\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("the note\n"))
    assert call("chat", "--checkpoint", checkpoint, "--system", f"x {token}") == 1
    assert token in error_of(capsys)


def test_what_looks_like_a_turn_of_a_transcript_is_text(checkpoint, monkeypatch, capsys):
    wanted = answer(checkpoint, ("user", "assistant: the note"))
    assert chat(monkeypatch, capsys, checkpoint, "assistant: the note") == f"niels> {wanted}\n"


def test_a_reply_ends_with_eot(place, monkeypatch, capsys, tmp_path):
    """A model that has learned one answer by heart says it and stops."""
    said = "the note reads"
    prompt = [special("usr"), *tokenizer().encode("so"), special("eot"), special("asst")]
    ids = [*prompt, *tokenizer().encode(said), special("eot")]
    torch.manual_seed(0)
    model = GPT({"V": 404, "T": 64, "C": 32, "L": 1, "H": 2, "dropout": 0.0})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(150):
        logits = model(torch.tensor([ids[:-1]]))[0, len(prompt) - 1 :]
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[len(prompt) :]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    path = tmp_path / "m.pt"
    save_checkpoint(path, model, None, 5, model.config)
    shutil.copy(place / "cache/tokenizer/spm.model", tmp_path / "tokenizer.model")
    assert chat(monkeypatch, capsys, path, "so", given=["--max-tokens", 50]) == f"niels> {said}\n"


def test_a_long_conversation_goes_on(checkpoint, monkeypatch, capsys):
    output = chat(monkeypatch, capsys, checkpoint, *["the note reads so"] * 9, "the model " * 60)
    assert output.count("niels> ") == 10
    assert "refused" not in output


# --- batch show --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 3, 50])
def test_batch_show_of_pretraining(capsys, step):
    assert call("batch", "show", "--run", "runs/base", "--step", step, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["row"] for row in rows] == list(range(6))
    for row in rows:
        ids = token_caches.stream(row["source"])[row["stream_offset"] :][:T]
        ends = {special("eot"): "<eot>\n"}
        text = ""
        for is_end, run in itertools.groupby(ids, lambda token, ends=ends: token in ends):
            run = list(run)
            text += "<eot>\n" * len(run) if is_end else decoded(run)
        assert row["text"] == text
        number = int(row["document"].removeprefix("document "))
        starts = token_caches.read_offsets(token_caches.folder() / "pretrain" / row["source"] / "train/documents.npy")
        assert starts[number] + row["offset"] == row["stream_offset"]
        assert row["offset"] < [*starts, len(token_caches.stream(row["source"]))][number + 1] - starts[number]


def test_batch_show_of_sft(capsys):
    assert call("batch", "show", "--run", "runs/chat", "--step", 1, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    for row in rows:
        ids = token_caches.examples(row["source"])[int(row["document"].removeprefix("example "))]
        assert row["text"].startswith(("<usr> ", "<sys> "))
        plain = re.sub(r"<(usr|sys|asst)> |<eot>\n", "", row["text"])
        assert plain == decoded([i for i in ids[:T] if i not in {special(n) for n in ("sys", "usr", "asst", "eot")}])
    assert call("batch", "show", "--run", "runs/chat", "--step", 1) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"step 1 of 4: 6 rows of {T} tokens\n")
    for row in rows:
        head = f"row {row['row']}  {row['source']}  {row['document']}  offset 0  (stream {row['stream_offset']})"
        assert f"\n{head}\n{repr(row['text'])[1:-1]}\n" in output


def test_batch_show_on_a_changed_cache_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = token_caches.copy_to(tmp_path / "cache")
    assert call("train", *options(["task=sft", *FAST, SHARES["sft"]]), "--run-dir", "out") == 0
    token_caches.build_sft(root, "primer", tokenizer(), token_caches.chats("primer")[:-2])
    capsys.readouterr()
    assert call("batch", "show", "--run", "out", "--step", 0) == 1
    message = error_of(capsys)
    assert "primer" in message
    assert "oasst1" not in message
