"""`python -m scripts.renew_replaced`: store the digests of the functions that kernels replace.

Run it after a deliberate edit of one of them, when every kernel computes what the new code says; `tests/kernels` and
`pytest -m gpu` compare them. Until then the model is computed by its own code (see `niels_gpt/kernels/replaced.py`).
"""

from __future__ import annotations

import json
from pathlib import Path

import niels_gpt.model.lora  # noqa: F401  (so that its functions are found)
from niels_gpt.kernels import replaced

PATH = Path(replaced.__file__).with_name(replaced.DATA)


def digests() -> dict[str, str | None]:
    """Return name -> digest of every function that kernels replace."""
    return {name: replaced.digest(replaced.find(name)) for name in replaced.FORWARD}


def main() -> None:
    """Write the digests, and print the names whose digest is new."""
    before, now = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}, digests()
    PATH.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    print("\n".join(name for name in now if now[name] != before.get(name)) or "nothing has changed")


if __name__ == "__main__":
    main()
