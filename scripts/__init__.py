"""Scripts to run by hand or in CI: `python -m scripts.NAME`."""
