"""`niels-gpt research lint`: counts of supervised tokens, the example it shows, and caches it refuses."""

import itertools
import json
import re
import shutil

import pytest

from tests import token_caches
from tests.cli import call, error_of
from tests.token_caches import SFT, special


def supervised(ids):
    """Return for each token whether the assistant says it: after its sentinel, up to and including EOT."""
    flags, speaking = [], False
    for token in ids:
        flags.append(speaking)
        speaking = token == special("asst") or (speaking and token != special("eot"))
    return flags


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def own(tmp_path):
    """A copy of the caches under the default path."""
    return token_caches.copy_to(tmp_path / "cache")


def lint(*arguments, root=None):
    return call("research", "lint", *arguments, "--cache-dir", root or token_caches.folder())


def naive_counts(name, split, T, root=None):
    """Count token by token."""
    found = {"examples": 0, "without_targets": 0, "cut": 0, "tokens": 0, "seen": 0, "supervised": 0}
    for ids in token_caches.examples(name, split, root):
        found["examples"] += 1
        found["tokens"] += len(ids)
        targets = 0
        for position, is_target in enumerate(supervised(ids)):
            if position <= T:
                found["seen"] += 1
                targets += is_target
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
    """Return the first T + 1 tokens with supervised ones in [[...]]."""
    text = ""
    for is_target, run in itertools.groupby(zip(ids[: T + 1], supervised(ids), strict=False), lambda pair: pair[1]):
        part = rendered([token for token, _ in run])
        text += f"[[{part}]]" if is_target else part
    return text


# --- counting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "split"), [(8, "train"), (16, "val"), (31, "train"), (1024, "val")])
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


def test_the_table(capsys):
    assert lint("-T", 16, "--seed", 1) == 0
    output = capsys.readouterr().out
    for name in SFT:
        counts = naive_counts(name, "train", 16)
        row = next(line.split() for line in output.splitlines() if line.startswith(name))
        assert name != "oasst1" or (counts["cut"] and counts["without_targets"])  # else this would prove little
        keys = ("examples", "without_targets", "cut", "seen", "supervised")
        assert row[1:] == [*(f"{counts[key]:,}" for key in keys), f"{100 * counts['share']:.1f}%"]


def test_defaults_and_names(own, capsys):
    assert call("research", "lint", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (len(found["caches"]), found["T"], found["split"]) == (3, 1024, "train")
    assert call("research", "lint", "primer", "dolly15k", "--json") == 0
    assert [row["cache"] for row in json.loads(capsys.readouterr().out)["caches"]] == ["primer", "dolly15k"]


# --- the example -------------------------------------------------------------------------------------


def shown_by(capsys):
    """Return (cache, split, index, text) of the example."""
    output = capsys.readouterr().out
    name, split, index, text = re.search(r"^(\w+), (\w+) example (\d+).*?:\n(.*)", output, re.M | re.S).groups()
    return name, split, int(index), text


@pytest.mark.parametrize(("T", "number"), [(16, 0), (31, 1), (16, 5), (1024, 17)])
def test_supervised_tokens_are_in_brackets_without_color(T, number, capsys):
    assert lint("oasst1", "-T", T, "--example", number) == 0
    name, split, shown, text = shown_by(capsys)
    assert (name, split, shown) == ("oasst1", "train", number)
    ids = token_caches.examples("oasst1")[number]
    assert text.rstrip("\n") == in_brackets(ids, T).rstrip("\n")
    assert "\x1b" not in text


def test_colors_on_a_terminal(monkeypatch, capsys):
    """Green are exactly the supervised tokens, and there are no brackets."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    ids = next(ids for ids in token_caches.examples("oasst1") if ids.count(special("asst")) == 2)
    number = token_caches.examples("oasst1").index(ids)
    assert lint("oasst1", "--example", number) == 0
    text = shown_by(capsys)[3]
    assert "[[" not in text
    green = re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", text, re.DOTALL)
    targets = [token for token, is_target in zip(ids, supervised(ids), strict=True) if is_target]
    assert "".join(green).replace("\n", "") == rendered(targets).replace("\n", "")  # line ends have no color
    assert re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip("\n") == rendered(ids).rstrip("\n")


def test_a_random_example_has_targets_and_a_seed_repeats_it(capsys):
    T = 8  # few examples have one so early
    good = token_caches.usable(token_caches.examples("dolly15k"), T)
    assert 0 < len(good) < 5
    numbers = []
    for seed in ([], [], ["--seed", 3], ["--seed", 3], *(["--seed", i] for i in range(12))):
        assert lint("dolly15k", "-T", T, *seed) == 0
        numbers.append(shown_by(capsys)[2])
    assert set(numbers) == set(good)
    assert numbers[2] == numbers[3]


def test_text_like_markup_is_shown_as_it_is(own, capsys):
    user, said = "see [bold]this[/bold] :warning: [/] \\[x] " + "long " * 40, "[red]no[/red] {x} [[y]] :smile: é"
    talks = [[{"role": "user", "content": user}, {"role": "assistant", "content": said}]] * 4
    token_caches.build_sft(own, "strange", token_caches.tokenizer(), talks)
    assert lint("strange", "--example", 0, root=own) == 0
    assert shown_by(capsys)[3].rstrip("\n") == f"<usr> {user}<eot>\n<asst> [[{said}<eot>\n]]"


def test_an_example_out_of_range(capsys):
    assert len(token_caches.examples("oasst1")) == 23
    assert lint("oasst1", "--example", 22) == 0
    capsys.readouterr()
    assert lint("oasst1", "--example", 23) == 1
    assert re.search(r"0\.\.22.*23", error_of(capsys))


# --- what is refused ---------------------------------------------------------------------------------


def test_a_cache_without_any_target_is_refused_and_the_others_are_counted(own, capsys):
    talks = [[{"role": "user", "content": f"the {i} so"}] for i in range(8)]
    token_caches.build_sft(own, "silent", token_caches.tokenizer(), talks)
    assert lint("--json", root=own) == 1
    output, errors = capsys.readouterr()
    found = json.loads(output)
    assert [row["cache"] for row in found["caches"]] == sorted(SFT)
    (refused,) = found["refused"]
    assert str(own / "sft" / "silent") in refused
    assert errors == f"error: {refused}\n"
    assert lint(root=own) == 1
    assert "primer" in capsys.readouterr().out


def test_a_context_without_targets(capsys):
    assert lint("-T", 1) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    for name, line in zip(sorted(SFT), errors, strict=True):
        assert line.startswith("error: ")
        assert name in line
        assert "T + 1 = 2" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gone"], ["gone", "primer"]),
        (["roam"], ["roam"]),  # a pretrain cache has no conversations
        (["--split", "test"], ["--split", "train or val", "'test'"]),
    ],
)
def test_names_and_splits_that_do_not_exist(arguments, words, capsys):
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
    assert str(own) in message
    assert "niels-gpt cache build" in message
