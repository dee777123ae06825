"""Without Levanter, only the tests of the error message are collected."""

from importlib import util
from pathlib import Path

if util.find_spec("levanter") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_installed.py"]
