# Every target sets up .venv itself if it is missing or older than what defines it, and only then.
PYTHON ?= python3
PIP := pip install --quiet --disable-pip-version-check -c constraints.txt
VENV := .venv
PEERS := .venv-peers
PEERS_LITGPT := .venv-peers-litgpt
BIN := $(VENV)/bin

.PHONY: setup demo shell test test-fresh test-gpu campaign check bench bench-peers clean help

help:
	@echo "make demo         train, measure and chat with a small model, offline (three minutes on two fast cores)"
	@echo "make shell        a shell with niels-gpt on the PATH"
	@echo "make test         the tests"
	@echo "make test-fresh   the property tests with new cases; SEED=N repeats those of a printed seed"
	@echo "make test-gpu     the tests that need CUDA, one after the other"
	@echo "make campaign     faults on purpose (kills, power cuts, flipped bits, ...) for MINUTES=5; SEED=N repeats a printed seed"
	@echo "make check        ruff, mypy, and the layers (import-linter)"
	@echo "make bench        speed, beside peers where make bench-peers has installed them (a GPU: python -m bench --device cuda)"
	@echo "make setup        only the virtual environment"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m $(PIP) -e '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/niels-gpt demo

shell: setup
	@echo "niels-gpt is on the PATH of this shell; exit ends it"
	@VIRTUAL_ENV="$(CURDIR)/$(VENV)" PATH="$(CURDIR)/$(BIN):$$PATH" $${SHELL:-sh}

# Two processes with one thread each: half the time of one process with two.
TEST_PROCESSES ?= 2

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal

# Property tests with new cases: the seed is printed, and SEED=N repeats them.
SEED ?= $(shell date +%s)

test-fresh: setup
	@echo "property tests with NIELS_GPT_TEST_SEED=$(SEED)"
	NIELS_GPT_TEST_SEED=$(SEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "property and not gpu" -n $(TEST_PROCESSES) --dist worksteal

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

# Kills, power cuts, errors, flipped bits and bad input; a failure prints the command that repeats it.
MINUTES ?= 5

campaign: setup
	@$(BIN)/python -m tests.campaign --minutes $(MINUTES) --seed $(SEED) --jobs $(TEST_PROCESSES)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# litgpt requires numpy < 2, which breaks the pyarrow of datasets and TRL, so it has a separate environment.
# bench/peers.py chooses the environment of each contender.
bench-peers: $(PEERS)/.ready $(PEERS_LITGPT)/.ready

$(PEERS)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(PEERS): niels-gpt, transformers and trl"
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/python -m $(PIP) -e . transformers trl
	@touch $@

$(PEERS_LITGPT)/.ready: constraints.txt
	@echo "setting up $(PEERS_LITGPT): litgpt"
	@test -x $(PEERS_LITGPT)/bin/python || $(PYTHON) -m venv $(PEERS_LITGPT)
	@$(PEERS_LITGPT)/bin/python -m $(PIP) torch litgpt
	@touch $@

bench: setup
	@$(BIN)/python -m bench

clean:
	rm -rf $(VENV) $(PEERS) $(PEERS_LITGPT) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
