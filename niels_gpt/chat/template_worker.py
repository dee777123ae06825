"""Render one Jinja template in a process without files, network or much memory. Run as a script, not imported.

`template_process.py` starts it. The environment is that of transformers: its options, its filter `tojson`,
`raise_exception`, `strftime_now` and the tag `generation`. A template is code of others: the sandbox keeps it from
Python's objects, and the limits of the process keep it from everything else.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from niels_gpt.system.untrusted_files import MEMORY, answer_lines

MOST_CHARACTERS = 16 << 20


class Generation(jinja2.ext.Extension):
    """The tag `generation`, which marks replies for transformers; here its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, in which no name begins with an underscore."""

    def __init__(self, *args: Any, **values: Any) -> None:
        found = dict(*args, **values)
        for name in found:
            _check_name(name)
        super().__init__(found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace has no attribute {str(name)!r}")


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str) -> Any:
    """Return the compiled template. Raises TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise, "namespace": Namespace, "dict": lambda *args, **values: dict(*args, **values),
    }  # fmt: skip
    return environment.from_string(source)


def render(template: Any, call: dict[str, Any]) -> dict[str, str]:
    """Return {text}, or {error} with the reason."""
    now = datetime.datetime.fromisoformat(call["now"])
    try:
        parts, size = [], 0
        for part in template.generate(**call["variables"], strftime_now=now.strftime):
            size += len(part)
            if size > MOST_CHARACTERS:
                return {"error": f"it writes more than {MOST_CHARACTERS:,} characters"}
            parts.append(part)
        return {"text": "".join(parts)}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except SecurityError as err:
        return {"error": f"it tries to leave its sandbox: {err}"}
    except Exception as err:
        return {"error": str(err) or type(err).__name__}


class Renderer:
    """Answers requests: the first one is the template, each further one a list of renderings."""

    def __init__(self) -> None:
        self._template: Any = None

    def __call__(self, request: Any) -> Any:
        """Return what is wrong with the template (None: nothing), or a list of what `render` returns."""
        if self._template is not None:
            return [render(self._template, call) for call in request]
        try:
            self._template = compile_template(request)
        except jinja2.TemplateSyntaxError as err:
            return f"has a syntax error in line {err.lineno}: {err.message}"
        except (MemoryError, RecursionError) as err:
            return f"cannot be compiled: {type(err).__name__}"
        return None


def main() -> None:
    """Load what is loaded late, before no file can be opened any more; then answer."""
    now = {"now": "2024-07-26T00:00:00", "variables": {"x": [{"a": 1}]}}
    for source in (
        "{{ x | tojson }}{{ strftime_now('%d %b %Y') }}",
        "{{ raise_exception('') }}",
        "{{ x.__class__ }}",
        "{{ 'a b' | wordwrap(1) }}{{ x | pprint }}{{ lipsum(1) }}",
    ):
        render(compile_template(source), now)
    with contextlib.suppress(jinja2.TemplateSyntaxError):
        compile_template("{% if %}")
    answer_lines(Renderer())


if __name__ == "__main__":
    main()
