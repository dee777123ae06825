"""List the licence of every dependency, and fail for one that is not on the list of allowed licences.

    python -m scripts.licences [--extra dev]... [--quiet]

Without --extra, the extras of `make setup` are included.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.metadata import Distribution

from scripts.dependencies import closure, own_requirements

ALLOWED = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSD", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "MIT",
    "MIT-CMU", "PSF-2.0", "Unlicense", "Zlib",
    "MPL-2.0",  # its conditions hold for its own files only, and we change none of them
}  # fmt: skip
EXCEPTIONS = {r"(nvidia|cuda)-.*": "NVIDIA's licence; only the CUDA builds of torch require it, and we do not ship it"}
"""Pattern of a name -> why it is accepted whatever its licence."""
NAMES = {
    r"apache( software)?( licen[cs]e)?,?( version)?[ -]?2?(\.0)?( licen[cs]e)?": "Apache-2.0",
    r"(the )?mit( licen[cs]e)?": "MIT",
    r"(new |modified )?bsd( licen[cs]e)?": "BSD",
    r"bsd[ -]2[ -]clause( licen[cs]e)?": "BSD-2-Clause",
    r"(bsd[ -]3[ -]clause|3[ -]clause bsd)( licen[cs]e)?": "BSD-3-Clause",
    r"isc licen[cs]e( \(iscl\))?": "ISC",
    r"mozilla public licen[cs]e 2\.0 \(mpl 2\.0\)": "MPL-2.0",
    r"python software foundation licen[cs]e": "PSF-2.0",
    r"the unlicen[cs]e \(unlicen[cs]e\)": "Unlicense",
}
"""Names that metadata without an SPDX expression uses -> SPDX id."""


def licence_of(found: Distribution) -> str:
    """Return the SPDX expression of a distribution, or the text of its metadata where there is none."""
    metadata = found.metadata
    if metadata.get("License-Expression"):
        return metadata["License-Expression"]
    prefix = "License :: "
    classifiers = [text for text in metadata.get_all("Classifier") or () if text.startswith(prefix)]
    names = {_spdx(text.rpartition(" :: ")[2]) for text in classifiers} - {"OSI Approved"}
    if names:
        return " AND ".join(sorted(names))
    field = (metadata.get("License") or "").strip()
    return _spdx(field.splitlines()[0]) if field and field != "UNKNOWN" else "unknown"


def _spdx(name: str) -> str:
    for pattern, spdx in NAMES.items():
        if re.fullmatch(pattern, name.strip(), re.IGNORECASE):
            return spdx
    return name.strip()


def is_allowed(expression: str) -> bool:
    """Whether an SPDX expression is satisfied by allowed licences. False if it is not an expression."""
    tokens = re.findall(r"[()]|[^\s()]+", expression)

    def either() -> bool:
        value = both()
        while tokens[:1] == ["OR"]:
            tokens.pop(0)
            value = both() or value
        return value

    def both() -> bool:
        value = one()
        while tokens[:1] == ["AND"]:
            tokens.pop(0)
            value = one() and value
        return value

    def one() -> bool:
        token = tokens.pop(0)
        if token == "(":
            value = either()
            return bool(tokens) and tokens.pop(0) == ")" and value
        if tokens[:1] == ["WITH"]:  # an exception only adds permissions
            del tokens[:2]
        return token in ALLOWED

    try:
        return either() and not tokens
    except IndexError:
        return False


def main(arguments: list[str] | None = None) -> int:
    """Print the list; return 1 if a licence is not allowed or unknown, or a dependency is not installed."""
    parser = argparse.ArgumentParser(prog="licences", description=__doc__.partition("\n")[0])
    parser.add_argument("--extra", action="append", help="an extra to include (repeatable; default: dev)")
    parser.add_argument("--quiet", action="store_true", help="print only problems and the total")
    options = parser.parse_args(arguments)
    needed = closure(own_requirements(options.extra))
    rows = [(name, found.version, licence_of(found)) for name, found in needed.found.items()]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    refused = []
    for name, version, licence in rows:
        if not options.quiet:
            print(f"{name:{widths[0]}}  {version:{widths[1]}}  {licence}")
        if not is_allowed(licence) and not any(re.fullmatch(pattern, name) for pattern in EXCEPTIONS):
            refused.append(f"{name} {version}: {licence}")
    for line in refused:
        print(f"error: licence not allowed: {line}; replace the dependency, or extend ALLOWED in scripts/licences.py",
              file=sys.stderr)  # fmt: skip
    for name in needed.missing:
        print(f"error: {name} is required but not installed: run make setup", file=sys.stderr)
    print(f"licences: {len(rows)} dependencies, {len(refused)} with a licence that is not allowed")
    return 1 if refused or needed.missing else 0


if __name__ == "__main__":
    sys.exit(main())
