"""`niels-gpt data lint`: what it counts, what it shows, what it refuses."""

import itertools
import json
import re
import shutil

import pytest

from tests import token_caches
from tests.cli import call, error_of
from tests.token_caches import SFT, special, supervised


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def own(tmp_path):
    """A copy of the caches, in the usual place."""
    return token_caches.copy_to(tmp_path / "cache")


def lint(*arguments, root=None):
    return call("data", "lint", *arguments, "--cache-dir", root or token_caches.folder())


def naive_counts(name, split, T, root=None):
    """Token by token."""
    found = {"examples": 0, "without_targets": 0, "cut": 0, "tokens": 0, "seen": 0, "supervised": 0}
    for ids in token_caches.examples(name, split, root):
        found["examples"] += 1
        found["tokens"] += len(ids)
        targets = 0
        for place, said in enumerate(supervised(ids)):
            if place <= T:
                found["seen"] += 1
                targets += said
        found["cut"] += len(ids) > T + 1
        found["without_targets"] += targets == 0
        found["supervised"] += targets
    return {"cache": name, **found, "share": found["supervised"] / found["seen"]}


def rendered(ids):
    names = {special(name): f"<{name}> " for name in ("sys", "usr", "asst")} | {special("eot"): "<eot>\n"}
    text = ""
    for is_special, run in itertools.groupby(ids, lambda token: token in names):
        run = list(run)
        text += "".join(names[token] for token in run) if is_special else token_caches.tokenizer().decode(run)
    return text


def in_brackets(ids, T):
    """The first T + 1 tokens with what is supervised in [[...]]."""
    text = ""
    for said, run in itertools.groupby(zip(ids[: T + 1], supervised(ids), strict=False), lambda pair: pair[1]):
        part = rendered([token for token, _ in run])
        text += f"[[{part}]]" if said else part
    return text


# --- counting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("T", [8, 16, 31, 1024])
def test_tokens_are_counted_per_cache(T, split, capsys):
    assert lint("-T", T, "--split", split, "--json") == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    found = json.loads(output)
    assert (found["T"], found["split"], found["refused"]) == (T, split, [])
    assert [row["cache"] for row in found["caches"]] == sorted(SFT)
    for row in found["caches"]:
        wanted = naive_counts(row["cache"], split, T)
        assert row.pop("share") == pytest.approx(wanted.pop("share"))
        assert row == wanted


def test_the_counts_differ_with_the_context():
    """Guards the test above: examples are cut, and some have no target left."""
    short, long = naive_counts("oasst1", "train", 16), naive_counts("oasst1", "train", 1024)
    assert short["supervised"] < long["supervised"]
    assert short["cut"] > 0 == long["cut"]
    assert short["without_targets"] > 0 == long["without_targets"]


def test_the_usual_context_is_1024(capsys):
    assert lint("--json") == 0
    assert json.loads(capsys.readouterr().out)["T"] == 1024


def test_caches_are_chosen_by_name(capsys):
    assert lint("primer", "dolly15k", "--json") == 0
    assert [row["cache"] for row in json.loads(capsys.readouterr().out)["caches"]] == ["primer", "dolly15k"]


def test_the_table(capsys):
    assert lint("-T", 16, "--seed", 1) == 0
    output = capsys.readouterr().out
    for name in SFT:
        counts = naive_counts(name, "train", 16)
        row = next(line.split() for line in output.splitlines() if line.startswith(name))
        keys = ("examples", "without_targets", "cut", "seen", "supervised")
        assert row[1:] == [*(f"{counts[key]:,}" for key in keys), f"{100 * counts['share']:.1f}%"]


def test_the_usual_folder(own, capsys):
    assert call("data", "lint", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["caches"]) == 3


# --- the example -------------------------------------------------------------------------------------


def shown_by(capsys):
    """(cache, split, number, text) of the example."""
    output = capsys.readouterr().out
    head, _, text = output.partition("; the loss is on what is marked:\n")
    name, split, number = re.fullmatch(r"(\w+), (\w+) example (\d+)", head.splitlines()[-1]).groups()
    return name, split, int(number), text


@pytest.mark.parametrize("T", [16, 31, 1024])
@pytest.mark.parametrize("number", [0, 1, 5, 17])
def test_what_is_supervised_is_in_brackets_where_there_is_no_colour(T, number, capsys):
    assert lint("oasst1", "-T", T, "--example", number) == 0
    name, split, shown, text = shown_by(capsys)
    assert (name, split, shown) == ("oasst1", "train", number)
    ids = token_caches.examples("oasst1")[number]
    assert text.rstrip("\n") == in_brackets(ids, T).rstrip("\n")
    assert "\x1b" not in text


def test_examples_are_as_the_caches_hold_them(capsys):
    """Some are cut within a reply, some have several turns, one has characters of several bytes."""
    marked = []
    for number in range(len(token_caches.examples("oasst1"))):
        assert lint("oasst1", "--example", number) == 0
        text = shown_by(capsys)[3]
        marked.append(text.count("[["))
        for reply in re.findall(r"\[\[(.*?)\]\]", text, re.DOTALL):
            assert reply.endswith("<eot>\n")
        assert "\ufffd" not in text
    assert max(marked) > 1


def test_colours_on_a_terminal(monkeypatch, capsys):
    """Green is exactly what is supervised, and there are no brackets."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    ids = next(ids for ids in token_caches.examples("oasst1") if ids.count(special("asst")) == 2)
    number = token_caches.examples("oasst1").index(ids)
    assert lint("oasst1", "--example", number) == 0
    text = shown_by(capsys)[3]
    assert "[[" not in text
    green = re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", text, re.DOTALL)
    said = [token for token, is_said in zip(ids, supervised(ids), strict=True) if is_said]
    assert "".join(green).replace("\n", "") == rendered(said).replace("\n", "")  # line ends have no colour
    assert re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip("\n") == rendered(ids).rstrip("\n")


def test_a_random_example_has_targets_and_a_seed_shows_it_again(capsys):
    T = 8  # few examples have one so early
    good = token_caches.usable(token_caches.examples("dolly15k"), T)
    assert 0 < len(good) < 5
    numbers = []
    for seed in ([], [], ["--seed", 3], ["--seed", 3], *(["--seed", i] for i in range(20))):
        assert lint("dolly15k", "-T", T, *seed) == 0
        numbers.append(shown_by(capsys)[2])
    assert set(numbers) == set(good)
    assert numbers[2] == numbers[3]


def test_text_that_looks_like_markup_is_shown_as_it_is(own, capsys):
    user, said = "see [bold]this[/bold] :warning: [/] \\[x]", "[red]no[/red] {x} [[y]] :smile: é"
    talks = [[{"role": "user", "content": user}, {"role": "assistant", "content": said}]] * 4
    token_caches.build_sft(own, "strange", token_caches.tokenizer(), talks)
    assert lint("strange", "--example", 0, root=own) == 0
    assert shown_by(capsys)[3].rstrip("\n") == f"<usr> {user}<eot>\n<asst> [[{said}<eot>\n]]"


def test_long_lines_are_not_broken(own, capsys):
    said = "the model " * 80
    talks = [[{"role": "user", "content": "so"}, {"role": "assistant", "content": said}]] * 4
    token_caches.build_sft(own, "long", token_caches.tokenizer(), talks)
    assert lint("long", root=own) == 0
    assert f"[[{said}<eot>" in capsys.readouterr().out


@pytest.mark.parametrize("number", [23, 3000])
def test_an_example_out_of_range(number, capsys):
    assert len(token_caches.examples("oasst1")) == 23
    assert lint("oasst1", "--example", number) == 1
    message = error_of(capsys)
    assert "0..22" in message
    assert str(number) in message


# --- what is refused ---------------------------------------------------------------------------------


def silent(name):
    """Conversations in which the assistant does not say anything."""
    return [[{"role": "user", "content": f"{name} {i} so"}] for i in range(8)]


def test_a_cache_without_any_target_is_refused(own, capsys):
    token_caches.build_sft(own, "silent", token_caches.tokenizer(), silent("the"))
    assert lint("silent", root=own) == 1
    message = error_of(capsys)
    assert str(own / "sft" / "silent") in message
    assert "T + 1" in message


def test_the_others_are_counted_all_the_same(own, capsys):
    token_caches.build_sft(own, "silent", token_caches.tokenizer(), silent("the"))
    assert lint("--json", root=own) == 1
    output, errors = capsys.readouterr()
    found = json.loads(output)
    assert [row["cache"] for row in found["caches"]] == sorted(SFT)
    assert len(found["refused"]) == 1
    assert "silent" in found["refused"][0]
    assert errors == f"error: {found['refused'][0]}\n"
    assert lint(root=own) == 1
    output, errors = capsys.readouterr()
    assert "primer" in output
    assert "silent" in errors


def test_a_context_in_which_nothing_is_said(capsys):
    assert lint("-T", 1) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    for name, line in zip(sorted(SFT), errors, strict=True):
        assert line.startswith("error: ")
        assert name in line
        assert "T + 1 = 2" in line


def test_nothing_held_out(own, capsys):
    talk = token_caches.chats("primer")[:1]
    token_caches.build_sft(own, "one", token_caches.tokenizer(), talk)
    assert lint("one", root=own) == 0
    capsys.readouterr()
    assert lint("one", "--split", "val", root=own) == 1
    assert "val" in error_of(capsys)


def test_a_cache_of_another_tokenizer(own, capsys):
    token_caches.build_sft(own, "primer", token_caches.other_tokenizer())
    assert lint("primer", root=own) == 1
    assert "another tokenizer" in error_of(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gone"], ["gone", "primer"]),
        (["roam"], ["roam"]),  # a pretrain cache has no conversations
        (["--split", "test"], ["--split", "train or val", "'test'"]),
    ],
)
def test_what_is_not_there(arguments, words, capsys):
    assert lint(*arguments) == 1
    message = error_of(capsys)
    for word in words:
        assert word in message


def test_folders_without_caches(tmp_path, own, capsys):
    assert lint(root=tmp_path / "nowhere") == 1
    assert "nowhere" in error_of(capsys)
    shutil.rmtree(own / "sft")
    assert lint(root=own) == 1
    message = error_of(capsys)
    assert "no SFT cache" in message
    assert "niels-gpt cache build" in message
