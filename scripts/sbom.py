"""Write a software bill of materials (CycloneDX 1.5, JSON) of this project and of what it requires at run time.

    python -m scripts.sbom --output FILE

Versions and licences are those of this environment; hashes are those of requirements-locked.txt, where it has the same
version. The same environment gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import niels_gpt
from scripts.dependencies import closure, own_requirements
from scripts.licences import licence_of
from scripts.lock_requirements import LOCKED


def locked_hashes(text: str) -> dict[tuple[str, str], list[str]]:
    """Return {(name, version): sha256 of its wheels} of a requirements file."""
    found = {}
    for pin in re.finditer(r"^(\S+)==(\S+)((?: \\\n {4}--hash=sha256:\w+)+)", text, re.MULTILINE):
        found[pin[1], pin[2]] = re.findall(r"sha256:(\w+)", pin[3])
    return found


def bill(hashes: dict[tuple[str, str], list[str]]) -> dict[str, Any]:
    """Return the document."""
    needed = closure(own_requirements(extras=()))
    if needed.missing:
        raise ValueError(f"not installed: {', '.join(needed.missing)}: run make setup")
    reference = {name: f"pkg:pypi/{name}@{found.version}" for name, found in needed.found.items()}
    reference[""] = f"pkg:pypi/niels-gpt@{niels_gpt.__version__}"
    root = {
        "type": "application",
        "bom-ref": reference[""],
        "name": "niels-gpt",
        "version": niels_gpt.__version__,
        "purl": reference[""],
        "licenses": [{"license": {"id": "MIT"}}],
    }
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": root},
        "components": [_component(name, found, reference[name], hashes) for name, found in needed.found.items()],
        "dependencies": [
            {"ref": reference[name], "dependsOn": sorted(reference[other] for other in others)}
            for name, others in sorted(needed.requires.items())
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(document, sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "serialNumber": f"urn:uuid:{serial}",
    } | document


def _component(
    name: str, found: Distribution, reference: str, hashes: dict[tuple[str, str], list[str]]
) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": found.version,
        "purl": reference,
    }
    if found.metadata.get("License-Expression"):
        component["licenses"] = [{"expression": licence_of(found)}]
    else:
        component["licenses"] = [{"license": {"name": licence_of(found)}}]
    known = hashes.get((name, found.version.partition("+")[0]))
    if known:
        component["hashes"] = [{"alg": "SHA-256", "content": digest} for digest in known]
    return component


def main(arguments: list[str] | None = None) -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(prog="sbom", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        document = bill(locked_hashes(LOCKED.read_text(encoding="utf-8")) if LOCKED.exists() else {})
        options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except (OSError, ValueError) as err:
        print(f"error: cannot write the SBOM: {err}", file=sys.stderr)
        return 1
    print(f"{options.output}: {len(document['components'])} components")
    return 0


if __name__ == "__main__":
    sys.exit(main())
