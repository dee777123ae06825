"""Templates of others in their process: attacks end with one clear error, and the next call works."""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from niels_gpt.chat import template_process
from niels_gpt.chat.template_process import TemplateProcess, TemplateRefused
from niels_gpt.system import untrusted_files

NOW = "2025-01-02T03:04:05"


def render(source, **variables):
    (text,) = TemplateProcess(source, where="here").render([variables], NOW)
    return text


def test_renders_as_transformers_does():
    source = "{%- for m in messages %}\n  {% if m %}\n{{ m | tojson }}\n{% break %}\n  {% endif %}\n{% endfor %}"
    assert render(source, messages=[{"a": "é<>"}, 1]) == '{"a": "é<>"}\n'
    assert render("{{ strftime_now('%Y-%m-%d') }}") == "2025-01-02"
    assert render("{% generation %}a{{ x }}{% endgeneration %}b", x=1) == "a1b"
    assert (
        render("{% set n = namespace(x=1) %}{% for i in range(3) %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}") == "4"
    )
    assert render("{{ dict(a=1).a }}{{ missing }}") == "1"
    assert render("{{ 'a b' | wordwrap(1) }}{{ [1] | pprint }}") == "a\nb[1]"


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''['__class__'] }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '%s'.__mod__ }}",
    "{% set n = namespace(__class__=1) %}",
    "{{ self._TemplateReference__context }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__self__.__class__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_stays_in_its_sandbox(source):
    try:
        text = render(source, messages=[1])
    except TemplateRefused as err:
        assert "here" in str(err)
    else:
        assert text in ("", "{0.__class__}")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{{ 'a'.ljust(10**10) }}", "memory|too large"),
        ("{{ '%10000000000s' % 'a' }}", "memory|big|width"),
        ("{% set n = namespace(x='aaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "memory"),
        ("{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "memory"),
        ("{{ range(10**7) | list }}", "[Rr]ange"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "16,777,216 characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "itself"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ raise_exception('one\ntwo') }}", "one two$"),
        ("{{ raise_exception('x' * 10000) }}", "x{200}.*…$"),
    ],
)
def test_bounded(source, reason):
    process = TemplateProcess(source, where="here")
    with pytest.raises(TemplateRefused, match=reason) as err:
        process.render([{}], NOW)
    assert "\n" not in str(err.value)
    assert len(str(err.value)) < 400


@pytest.mark.slow
def test_endless_computing_is_ended():
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    process = TemplateProcess("{% if attack %}" + loop + "{% endif %}ok", where="here")
    with pytest.raises(TemplateRefused, match=r"more than 10 s"):
        process.render([{"attack": True}], NOW)
    assert process.render([{"attack": False}], NOW) == ["ok"]


@pytest.mark.slow
def test_endless_compiling_is_ended():
    """Jinja computes constants when it compiles."""
    with pytest.raises(TemplateRefused, match=r"more than 10 s"):
        render("{{ 9**(9**9) }}")


def test_a_worker_that_hangs_is_killed(monkeypatch, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import sys, time\nsys.stdin.readline()\nprint('null', flush=True)\ntime.sleep(1000)\n")
    monkeypatch.setattr(template_process, "WORKER", script)
    monkeypatch.setattr(untrusted_files, "WALL_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(TemplateRefused, match="more than"):
        TemplateProcess("a", where="here").render([{}], NOW)
    assert time.monotonic() - began < 500


def test_a_worker_that_is_killed_while_the_timer_starts_took_too_long(monkeypatch):
    """A busy machine can suspend the thread just there."""

    class Timer(threading.Timer):
        def start(self):
            time.sleep(self.interval)
            self.function()

    monkeypatch.setattr(untrusted_files.threading, "Timer", Timer)
    monkeypatch.setattr(untrusted_files, "WALL_SECONDS", 0.05)
    with pytest.raises(TemplateRefused, match="more than"):
        TemplateProcess("a", where="here").render([{}], NOW)


def test_an_interrupted_call_does_not_answer_the_next_one(monkeypatch):
    template = TemplateProcess("{{ x }}", where="here")
    assert template.render([{"x": "first"}], NOW) == ["first"]
    interrupted = template._process.process

    class NoAnswer:
        """The pipe of the process, of which Ctrl-C ends the first read."""

        def __init__(self, pipe):
            self.pipe, self.reads = pipe, 0

        def readline(self):
            self.reads += 1
            if self.reads == 1:
                raise KeyboardInterrupt
            return self.pipe.readline()

        def __getattr__(self, name):
            return getattr(self.pipe, name)

    monkeypatch.setattr(interrupted, "stdout", NoAnswer(interrupted.stdout))
    with pytest.raises(KeyboardInterrupt):
        template.render([{"x": "second"}], NOW)
    assert template.render([{"x": "third"}], NOW) == ["third"]
    assert interrupted.poll() is not None


def test_syntax_error_with_line():
    with pytest.raises(ValueError, match=r"here.*line 2"):
        render("a\n{% for %}")
    with pytest.raises(ValueError, match=r"here cannot be compiled: RecursionError"):
        render("{% if 1 %}" * 5000)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_can_be_opened():
    """Even code that has left the sandbox could open nothing: the process has no descriptors left."""
    process = TemplateProcess("x", where="here")
    process.render([{}], NOW)
    limits = Path(f"/proc/{process._process.process.pid}/limits").read_text(encoding="utf-8")
    (line,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    assert line.split()[3:5] == ["0", "0"]


def test_threads_share_a_process():
    process = TemplateProcess("{{ x }}", where="here")
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.update({n: process.render([{"x": n}, {"x": -n}], NOW)}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [str(n), str(-n)] for n in range(8)}


def test_the_process_ends_with_its_template():
    process = TemplateProcess("x", where="here")
    process.render([{}], NOW)
    pid = process._process.process.pid
    os.kill(pid, 0)
    del process
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_fork_leaves_the_process_of_its_parent():
    """A worker of a data loader, for example, starts its own."""
    template = TemplateProcess("{{ x }}", where="here")
    template.render([{"x": "parent"}], NOW)
    child = os.fork()
    if not child:
        os._exit(0 if template.render([{"x": "child"}], NOW) == ["child"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    started = template._process
    assert template.render([{"x": "parent again"}], NOW) == ["parent again"]
    assert template._process is started
