"""What all commands share: `-h`, `--threads`, `--quiet`, `--verbose`, old names of options, text that begins with -."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Optional, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from niels_gpt.system import console

OLD_NAMES = {
    "--roam": "--notes",
    "--roam-val-frac": "--notes-val-frac",
    "--token-cache": "--cache-dir",
    "--workers": "--threads",
    "--runs": "--runs-dir",
}
"""Former names of options: still accepted where a command has the new one, but not in the help."""
POSITIONAL_NAMES = {"--run": "RUN", "--cache-dir": "CACHE", "--notes": "FOLDER"}
"""Option names under which the first positional argument (by its metavar) is accepted too, but not in the help."""
MOST = 1_000_000_000
"""Upper limit of every integer option that has no other: no typing error starts endless work."""
MOST_BY_NAME = {
    "--seed": 2**63 - 1,
    "--threads": 4096,
    "--number": 100_000,
    "--shuffle-buffer": 10_000_000,
    **dict.fromkeys(("--context", "--window", "--prompt", "--stride", "--greedy"), 1_000_000),
    **dict.fromkeys(("--limit", "--train-tokens", "--val-tokens"), 10**12),
    **{f"--{name}-{split}-tokens": 10**12 for name in ("fineweb", "gutenberg") for split in ("train", "val")},
}
"""Upper limits of integer options by their names; an option may also set its own."""
_LONG_OPTION = re.compile(r"--[A-Za-z][A-Za-z0-9-]*(=.*)?", re.DOTALL)


_IN_EVERY_COMMAND = ("device", "threads", "quiet", "verbose", "help")
"""Parameters that are listed last in the help of a command whose options are in groups."""


class Command(TyperCommand):
    """A command that also accepts old names of options, and positional text that begins with a dash."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, arrange(args, self.get_params(ctx)))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options; those with a `rich_help_panel` below its title, the common ones last."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        common: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            if param.param_type_name == "argument":
                groups["Arguments"].append(record)
            elif panel := getattr(param, "rich_help_panel", None):
                groups.setdefault(panel, []).append(record)
            else:
                (common if param.name in _IN_EVERY_COMMAND else groups["Options"]).append(record)
        several = len(groups) > 2
        groups["Options" if not several else "In every command"] = [*(() if several else groups["Options"]), *common]
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class App(typer.Typer):
    """A group of commands; each has `-h`, `--threads`, `--quiet` and `--verbose`."""

    def __init__(self, *, help: str, add_completion: bool = False, cls: type[TyperGroup] = TyperGroup) -> None:
        super().__init__(
            cls=cls,
            help=help,
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            add_completion=add_completion,
            rich_markup_mode=None,
            context_settings={"help_option_names": ["-h", "--help"]},
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        register = super().command(name, **{"cls": Command, **settings})

        def decorate(function: Any) -> Any:
            register(_with_common_options(function))
            return function  # other commands call it directly

        return decorate


def arrange(args: Sequence[str], params: Sequence[Any]) -> list[str]:
    """Return the words of a command as click parses them: options with their present names, `--`, positional words.

    A word that begins with a dash is an option if the command has it or if it looks like one (`--letters`); otherwise
    it is positional in a command that takes a TEXT (`generate "- [["`). Raises ValueError for a positional argument
    that is given twice.
    """
    options = {
        name: param
        for param in params
        if param.param_type_name == "option"
        for name in (*param.opts, *param.secondary_opts)
    }
    arguments = [param for param in params if param.param_type_name == "argument"]
    first = arguments[0].metavar or "" if arguments else ""
    takes_text = any("TEXT" in (argument.metavar or "") for argument in arguments)
    named: list[str] = []
    words: list[str] = []
    by_option: list[tuple[str, str]] = []
    rest = iter(args)
    for word in rest:
        if word == "--":
            words.extend(rest)
            break
        name, equals, value = word.partition("=")
        if name not in options and OLD_NAMES.get(name) in options:
            name = OLD_NAMES[name]
        if name in options:
            named.append(name + equals + value)
            if not equals and not getattr(options[name], "is_flag", False):
                named.extend(itertools.islice(rest, 1))
        elif POSITIONAL_NAMES.get(OLD_NAMES.get(name, name), " ") in re.findall(r"\w+", first):
            values = [value] if equals else list(itertools.islice(rest, 1))
            by_option += [(name, each) for each in values]
            named += [] if values else [word]  # click says that it is no option; it has no value anyway
        elif (
            _LONG_OPTION.fullmatch(word)
            or (word[:2] in options and word[2:].isdigit())
            or (word.startswith("-") and len(word) > 1 and not takes_text)
        ):
            named.append(word)
        else:
            words.append(word)
    if by_option:
        (name, value), *more = by_option
        if more or (words and arguments[0].nargs == 1):
            other = f"{more[0][0]} {more[0][1]}" if more else words[0]
            raise ValueError(f"{name} {value} and {other} name the same thing: give one of them")
        words.insert(0, value)
    return [*named, *(["--", *words] if words else [])]


# --- options of every command ------------------------------------------------------------------------


def _set_threads(threads: int | None) -> int | None:
    """Use this many threads in torch, now or when it is imported."""
    if threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(threads)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(threads)
    return threads


def _set_quiet(quiet: bool) -> bool:
    console.set_quiet(quiet)
    return quiet


def _set_verbose(verbose: bool) -> bool:
    console.set_verbose(verbose)
    return verbose


ThreadsOption = Annotated[
    Optional[int],  # noqa: UP045 (typer reads it at run time)
    typer.Option(
        "--threads",
        min=1,
        max=MOST_BY_NAME["--threads"],
        is_eager=True,
        callback=_set_threads,
        help="CPU threads; default: all cores.",
    ),
]
QuietOption = Annotated[
    bool,
    typer.Option("--quiet", is_eager=True, callback=_set_quiet, help="Print results and errors only, no progress."),
]
VerboseOption = Annotated[
    bool,
    typer.Option("--verbose", is_eager=True, callback=_set_verbose, help="Also print details of the data, on stderr."),
]
_COMMON = {"threads": (ThreadsOption, None), "quiet": (QuietOption, False), "verbose": (VerboseOption, False)}


def _limited(name: str, annotation: Any) -> Any:
    """Return the annotation of a parameter; that of an integer has an upper limit."""
    kind, *declared = get_args(annotation) or [annotation]
    if int not in (kind, *get_args(kind)):
        return annotation
    (option,) = declared
    if option.max is None:
        option = copy.copy(option)
        names = [*(option.param_decls or ()), f"--{name.replace('_', '-')}"]
        option.max = next((MOST_BY_NAME[each] for each in names if each in MOST_BY_NAME), MOST)
    return Annotated[kind, option]


def _with_common_options(function: Any) -> Any:
    """Return the function with limits for its counts, and with the parameters of `_COMMON` that it lacks.

    The callbacks of those parameters do their work.
    """
    signature = inspect.signature(function, eval_str=True)
    limited = [p.replace(annotation=_limited(p.name, p.annotation)) for p in signature.parameters.values()]
    signature = signature.replace(parameters=limited)
    added = {name: option for name, option in _COMMON.items() if name not in signature.parameters}

    @functools.wraps(function)
    def run(*args: Any, **values: Any) -> Any:
        return function(*args, **{name: value for name, value in values.items() if name not in added})

    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in added.items()
    ]
    parameters = [*signature.parameters.values(), *extra]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
