"""Scripts for hand and CI: `python -m scripts.NAME`."""
