# Every target sets up .venv itself if it is missing or older than what defines it, and only then.
PYTHON ?= python3
PIP := pip install --quiet --disable-pip-version-check -c constraints.txt
VENV := .venv
TOOLS := .venv-tools
PEERS := .venv-peers
RAY := .venv-ray
BROWSER := .venv-browser
DOCS := .venv-docs
PEERS_LITGPT := .venv-peers-litgpt
LEVANTER := .venv-levanter
SERVE := .venv-serve
GGUF := .venv-gguf
BIN := $(VENV)/bin

.PHONY: setup demo shell docs test test-browser test-docs test-fresh test-gguf test-gpu test-levanter test-ray test-serve campaign soak load check bench bench-peers clean help
.PHONY: setup-locked lock tools audit release

help:
	@echo "make demo         train, measure and chat with a small model, offline (three minutes on two fast cores)"
	@echo "make shell        a shell with niels-gpt on the PATH"
	@echo "make test         the tests"
	@echo "make test-fresh   the property tests with new cases; SEED=N repeats those of a printed seed"
	@echo "make test-gguf    exported GGUF files in llama.cpp, in an environment of their own (built once; eight minutes)"
	@echo "make test-gpu     the tests that need CUDA, one after the other"
	@echo "make test-levanter the tests of the Levanter adapter, in an environment with JAX (1.8 GB, installed once)"
	@echo "make test-browser the tests of the page in Chromium (installed by apt if it is missing)"
	@echo "make test-ray     the tests with a Ray cluster and an S3 server, in an environment of their own"
	@echo "make test-serve   the server with OpenAI's, litellm's and LangChain's clients, in an environment of their own"
	@echo "make docs         the docs site in site/ (offline; open site/index.html)"
	@echo "make test-docs    build the docs site, test it, and run every shell block of the how-to pages"
	@echo "make campaign     faults on purpose (kills, power cuts, flipped bits, ...) for MINUTES=5; SEED=N repeats a printed seed"
	@echo "make soak         train, rebuild, chat and audit in one process for MINUTES=5; memory and files must not grow"
	@echo "make load         streams, disconnects and slow readers on niels-gpt serve for MINUTES=5; memory must not grow"
	@echo "make check        ruff, mypy, the layers (import-linter), licences and known vulnerabilities of dependencies"
	@echo "make bench        speed, beside peers where make bench-peers has installed them (a GPU: python -m bench --device cuda)"
	@echo "make setup        only the virtual environment"
	@echo "make setup-locked the same with the versions and hashes of requirements-locked.txt (make lock writes it)"
	@echo "make release      dist/: sdist, wheel, SBOM (CycloneDX) and sha256 sums"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m $(PIP) -e '.[dev,serve,export]'
	@touch $@

# Every download must have a hash of requirements-locked.txt. hatchling is one of them, so nothing else is downloaded to
# build the project.
setup-locked:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-locked.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(VENV)/.ready

lock: setup
	@$(BIN)/python -m scripts.lock_requirements

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

# JAX and Levanter have a separate environment: they are large, and nothing else imports them.
test-levanter: $(LEVANTER)/.ready
	OMP_NUM_THREADS=1 $(LEVANTER)/bin/python -m pytest -n0 tests/levanter

$(LEVANTER)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(LEVANTER): niels-gpt, Levanter and JAX (once; a few minutes)"
	@test -x $(LEVANTER)/bin/python || $(PYTHON) -m venv $(LEVANTER)
	@$(LEVANTER)/bin/python -m $(PIP) -e '.[dev,levanter]'
	@touch $@

# Ray and moto are large, so their tests have a separate environment; `make test` skips them.
test-ray: $(RAY)/.ready
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/ray

$(RAY)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(RAY): niels-gpt, ray, s3fs and moto"
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	@$(RAY)/bin/python -m $(PIP) -e '.[dev,ray,s3]' 's3fs>=2026.6' 'moto[server]>=5'
	@touch $@

# `make test` has the tests of the server, but not the clients that nothing else needs.
test-serve: $(SERVE)/.ready
	OMP_NUM_THREADS=1 $(SERVE)/bin/python -m pytest -n0 tests/serve/test_other_clients.py tests/serve/test_openai_client.py

$(SERVE)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(SERVE): niels-gpt, litellm and langchain-openai"
	@test -x $(SERVE)/bin/python || $(PYTHON) -m venv $(SERVE)
	@$(SERVE)/bin/python -m $(PIP) -e '.[dev,serve]' litellm langchain-openai
	@touch $@

# llama.cpp is compiled from the sdist of llama-cpp-python, so its tests have a separate environment.
test-gguf: $(GGUF)/.ready
	OMP_NUM_THREADS=1 $(GGUF)/bin/python -m pytest -n0 -s tests/gguf

$(GGUF)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(GGUF): niels-gpt and llama-cpp-python (once; eight minutes)"
	@test -x $(GGUF)/bin/python || $(PYTHON) -m venv $(GGUF)
	@$(GGUF)/bin/python -m $(PIP) -e '.[dev,export]' 'llama-cpp-python[server]>=0.3.16'
	@touch $@

# Screenshots are written to tests/browser/artefacts, or NIELS_GPT_ARTEFACTS.
CHROMIUM ?= /usr/bin/chromium
AS_ROOT := $(shell test "$$(id -u)" = 0 || echo sudo)

test-browser: $(BROWSER)/.ready $(DOCS)/.ready
	@test -x $(CHROMIUM) || $(AS_ROOT) sh -c "apt-get update -qq && apt-get install -y -qq chromium"
	NIELS_GPT_CHROMIUM=$(CHROMIUM) OMP_NUM_THREADS=1 $(BROWSER)/bin/python -m pytest -n0 tests/browser

$(BROWSER)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(BROWSER): niels-gpt, Playwright and axe"
	@test -x $(BROWSER)/bin/python || $(PYTHON) -m venv $(BROWSER)
	@$(BROWSER)/bin/python -m $(PIP) -e '.[dev,serve]' 'playwright>=1.49' 'axe-playwright-python>=0.1.4'
	@touch $@

# The site needs neither torch nor niels-gpt (docstrings are read from the sources), so only the extra is installed.
# Not with --quiet: it hides warnings from --strict.
docs: $(DOCS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict
	@echo "site/index.html"

$(DOCS)/.ready: pyproject.toml
	@echo "setting up $(DOCS): mkdocs-material and mkdocstrings"
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(DOCS)/requirements.txt
	@$(DOCS)/bin/python -m $(PIP) -r $(DOCS)/requirements.txt
	@touch $@

test-docs: setup docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n0 tests/test_docs.py tests/scripts/test_docs_site.py tests/test_how_to.py

# Kills, power cuts, errors, flipped bits and bad input; a failure prints the command that repeats it.
MINUTES ?= 5

campaign: setup
	@$(BIN)/python -m tests.campaign --minutes $(MINUTES) --seed $(SEED) --jobs $(TEST_PROCESSES)

soak: setup
	@$(BIN)/python -m tests.campaign.soak --minutes $(MINUTES)

load: setup
	@$(BIN)/python -m tests.serve.load --minutes $(MINUTES)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m scripts.licences --quiet
	@$(MAKE) --no-print-directory audit

# Without a network, both lines say that the audit is skipped; a vulnerability that another version fixes is an error.
audit: setup
	@$(MAKE) --no-print-directory --silent tools 2>/dev/null || echo "vulnerabilities: pip-audit cannot be installed now"
	@$(BIN)/python -m scripts.audit_dependencies --tool $(TOOLS)/bin/pip-audit

# Tools that the project does not import have a separate environment: they would add 30 packages to $(VENV).
tools: $(TOOLS)/.ready

$(TOOLS)/.ready:
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 15 pip-audit build
	@touch $@

release: setup tools
	@rm -rf dist
	@$(TOOLS)/bin/python -m build --outdir dist . >/dev/null
	@$(BIN)/python -m scripts.sbom --output dist/sbom.cdx.json
	@cd dist && { sha256sum niels_gpt* sbom.cdx.json 2>/dev/null || shasum -a 256 niels_gpt* sbom.cdx.json; } > SHA256SUMS
	@cat dist/SHA256SUMS

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
	rm -rf $(VENV) $(TOOLS) dist $(PEERS) $(PEERS_LITGPT) $(LEVANTER) $(RAY) $(SERVE) $(GGUF) $(BROWSER) $(DOCS) site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
