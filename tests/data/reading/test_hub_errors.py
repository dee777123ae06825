"""Which errors are transient, and what they report."""

import errno
import socket
from types import SimpleNamespace

import datasets
import pytest

from niels_gpt.data.reading.hub_errors import chain, is_transient, reason, retry_after, status
from tests.data.reading.failures import FINAL, TRANSIENT, Refused, caused, hub_error, reset


@pytest.mark.parametrize("name", TRANSIENT)
def test_transient_errors(name):
    assert is_transient(TRANSIENT[name])


@pytest.mark.parametrize("name", FINAL)
def test_final_errors(name):
    assert not is_transient(FINAL[name])


@pytest.mark.parametrize(
    ("code", "transient"),
    [(400, False), (407, False), (408, True), (409, False), (424, False), (425, True), (426, False), (428, False),
     (429, True), (430, False), (499, False), (500, True), (501, True), (599, True)],
)  # fmt: skip
def test_status_codes(code, transient):
    assert is_transient(Refused(code)) is transient


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refused(503), 503),
        (SimpleNamespace(status=404), 404),
        (SimpleNamespace(code=429), 429),
        (SimpleNamespace(response=SimpleNamespace(status_code=None), status=500), 500),
        (SimpleNamespace(status=100), 100),
        (SimpleNamespace(status=99), None),
        (SimpleNamespace(status=599), 599),
        (SimpleNamespace(status=600), None),
        (SimpleNamespace(code="404"), None),
        (ValueError("no status"), None),
    ],
)
def test_status(error, code):
    assert status(error) == code


def test_chain_follows_causes_and_contexts():
    inner, middle = reset(), ConnectionError("middle")
    outer = caused(RuntimeError("outer"), caused(middle, inner))
    assert chain(outer) == [outer, middle, inner]
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904
    except ValueError as err:
        assert [type(error) for error in chain(err)] == [ValueError, KeyError]
    inner.__cause__ = outer  # a cycle
    assert chain(outer) == [outer, middle, inner]


def test_an_oserror_by_its_errno():
    assert is_transient(OSError("no errno"))
    assert is_transient(OSError(errno.EAGAIN, "try again"))
    assert not is_transient(OSError(errno.EACCES, "denied"))
    assert is_transient(socket.gaierror(-2, "unknown name"))
    assert not is_transient(ValueError("no OSError"))


def test_retry_after():
    assert retry_after(Refused(429, {"Retry-After": "7.5"})) == 7.5
    assert retry_after(caused(RuntimeError("outer"), hub_error(429, {"Retry-After": "9"}))) == 9
    assert retry_after(Refused(429, {"Retry-After": "soon"})) == 0
    assert retry_after(Refused(429)) == retry_after(ValueError("no response")) == 0


def test_reason_is_the_first_line_of_the_first_message():
    assert reason(ValueError("first\nsecond")) == "first"
    assert reason(caused(RuntimeError(""), ValueError("inner"))) == "inner"
    assert reason(RuntimeError()) == "RuntimeError"
    generating = datasets.exceptions.DatasetGenerationError("An error occurred")
    assert reason(caused(generating, ValueError("the cause"))) == "the cause"
    assert reason(datasets.exceptions.DatasetGenerationError("alone")) == "alone"
    assert reason(caused(ConnectionError("Server Disconnected"), Refused(429))) == str(Refused(429)).splitlines()[0]
    assert reason(ConnectionError("Server Disconnected")) == "Server Disconnected"
    assert reason(ValueError("403 Forbidden: None.")) == "403 Forbidden: None"
