"""`python -m niels_gpt.cache.cli ...`: the specified name of `niels_gpt.cli.cache`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("niels_gpt.cli.cache", run_name="__main__", alter_sys=True)
