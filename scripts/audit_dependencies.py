"""Look up known vulnerabilities of the installed dependencies with pip-audit.

    python -m scripts.audit_dependencies [--tool PATH] [--timeout SECONDS]

Exit status: 1 if a dependency has a known vulnerability that another version fixes, else 0. Where the vulnerability
service cannot be reached, or pip-audit is not installed, it prints `skipped` and why.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.dependencies import closure, own_requirements

NAME = "vulnerabilities"


def audit(tool: str, pins: list[str], timeout: float) -> dict[str, Any] | str:
    """Return the report of pip-audit for `name==version` lines, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text("\n".join(pins) + "\n", encoding="utf-8")
        command = [tool, "--requirement", str(file), "--no-deps", "--disable-pip", "--format", "json"]
        command += ["--progress-spinner", "off", "--timeout", "5"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return f"the vulnerability service did not answer within {timeout:.0f} s"
        except OSError as err:
            return f"cannot run {tool}: {err.strerror}"
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return f"the vulnerability service is not reachable: {lines[-1][:200]}"
    return report


def main(arguments: list[str] | None = None) -> int:
    """Print the result in one line, and a line per vulnerability."""
    parser = argparse.ArgumentParser(prog="audit_dependencies", description=__doc__.partition("\n")[0])
    parser.add_argument("--tool", default="pip-audit", help="path of pip-audit")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for the whole audit")
    options = parser.parse_args(arguments)
    if shutil.which(options.tool) is None:
        print(f"{NAME}: skipped: pip-audit is not installed ({options.tool}): run make tools")
        return 0
    # Without the local version: the service knows 2.13.0, not 2.13.0+cpu.
    found = closure(own_requirements()).found
    pins = [f"{name}=={one.version.partition('+')[0]}" for name, one in found.items()]
    report = audit(options.tool, pins, options.timeout)
    if isinstance(report, str):
        print(f"{NAME}: skipped: {report}")
        return 0
    entries = report.get("dependencies", [])
    audited = [entry for entry in entries if "skip_reason" not in entry]
    if not audited:
        print(f"{NAME}: skipped: the vulnerability service knows none of {len(pins)} dependencies: {_why(entries)}")
        return 0
    fixable = 0
    for entry in audited:
        for one in entry.get("vulns", []):
            versions = ", ".join(one.get("fix_versions") or [])
            fixable += bool(versions)
            remedy = f"upgrade to {versions}" if versions else "no version fixes it yet"
            print(f"{'error' if versions else 'warning'}: {entry['name']} {entry['version']}: {one['id']}: {remedy}")
    unknown = f", {len(entries) - len(audited)} not known to the service" if len(entries) > len(audited) else ""
    print(f"{NAME}: {len(audited)} dependencies audited{unknown}, {fixable} with a fix available")
    return 1 if fixable else 0


def _why(entries: list[dict[str, Any]]) -> str:
    return entries[0]["skip_reason"].splitlines()[0] if entries else "it returned an empty report"


if __name__ == "__main__":
    sys.exit(main())
