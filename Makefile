# Every target sets up .venv itself if it is missing or older than what defines it, and only then.
PYTHON ?= python3
# pip shows its progress: in a terminal bars, elsewhere lines per package. PIP_QUIET=1 hides it, as .ci/run does.
# Python compiles a module when it is first imported; pip would compile all 16,000, which is half of its time.
PIP := pip install --disable-pip-version-check --no-compile -c constraints.txt
VENV := .venv
TOOLS := .venv-tools
EXTRAS := .venv-extras
RAY := .venv-ray
LEVANTER := .venv-levanter
GGUF := .venv-gguf
PEERS := .venv-peers
PEERS_LITGPT := .venv-peers-litgpt
BIN := $(VENV)/bin

.PHONY: help setup setup-locked lock demo shell test docs check tools audit release bench bench-peers clean

help:
	@echo "make demo         train, measure and chat with a small model, offline (three minutes on two fast cores)"
	@echo "make shell        a shell with niels-gpt on the PATH"
	@echo "make test         the tests; make test WHAT=... runs others:"
	@echo "  fresh           the property tests with new cases; SEED=N repeats those of a printed seed"
	@echo "  docs            the docs site, and every shell block of the how-to pages"
	@echo "  gpu             the tests that need CUDA, one after the other"
	@echo "  serve           the server with OpenAI's, litellm's and LangChain's clients"
	@echo "  browser         the page in Chromium (installed by apt if it is missing)"
	@echo "  ray             builds of caches on a Ray cluster, and an S3 server"
	@echo "  levanter        the Levanter adapter, in an environment with JAX (1.8 GB, installed once)"
	@echo "  gguf            exported GGUF files in llama.cpp, in an environment of their own (built once; eight minutes)"
	@echo "  campaign        faults on purpose (kills, power cuts, flipped bits, ...) for MINUTES=5; SEED=N repeats a seed"
	@echo "  soak            train, rebuild, chat and audit in one process for MINUTES=5; memory and files must not grow"
	@echo "  load            streams, disconnects and slow readers on the server for MINUTES=5; memory must not grow"
	@echo "make docs         the docs site in site/ (offline; open site/index.html)"
	@echo "make check        ruff, mypy, the layers, the budget of lines, licences and vulnerabilities of dependencies"
	@echo "make bench        speed, beside peers where make bench-peers has installed them (a GPU: python -m bench --device cuda)"
	@echo "make setup        only the virtual environment"
	@echo "make setup-locked the same with the versions and hashes of requirements-locked.txt (make lock writes it)"
	@echo "make release      dist/: sdist, wheel, SBOM (CycloneDX) and sha256 sums"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m $(PIP) 'pip>=25.1' || true  # older ones show no progress while they unpack torch, for minutes
	@$(BIN)/python -m $(PIP) -e '.[dev,serve,export]'
	@echo "$(VENV) is ready"
	@touch $@

# Every download must have a hash of requirements-locked.txt. hatchling is one of them, so nothing else is downloaded to
# build the project.
setup-locked:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r requirements-locked.txt
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
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
# Property tests with new cases, and faults: the seed is printed, and SEED=N repeats them.
SEED ?= $(shell date +%s)
MINUTES ?= 5
CHROMIUM ?= /usr/bin/chromium
AS_ROOT := $(shell test "$$(id -u)" = 0 || echo sudo)
WHAT ?= main

PYTEST := -m pytest
SPREAD := -n $(TEST_PROCESSES) --dist worksteal
TEST_main := $(BIN)/python $(PYTEST) $(SPREAD)
TEST_fresh := NIELS_GPT_TEST_SEED=$(SEED) $(BIN)/python $(PYTEST) -m "property and not gpu" $(SPREAD)
TEST_docs := $(BIN)/python $(PYTEST) -n0 tests/test_docs.py tests/scripts/test_docs_site.py tests/test_how_to.py
TEST_gpu := $(BIN)/python $(PYTEST) -m gpu
TEST_serve := $(EXTRAS)/bin/python $(PYTEST) -n0 tests/serve/test_other_clients.py tests/serve/test_openai_client.py
# Screenshots are written to tests/browser/artefacts, or NIELS_GPT_ARTEFACTS.
TEST_browser := NIELS_GPT_CHROMIUM=$(CHROMIUM) $(EXTRAS)/bin/python $(PYTEST) -n0 tests/browser
TEST_ray := $(RAY)/bin/python $(PYTEST) tests/ray
TEST_levanter := $(LEVANTER)/bin/python $(PYTEST) -n0 tests/levanter
TEST_gguf := $(GGUF)/bin/python $(PYTEST) -n0 -s tests/gguf
# Kills, power cuts, errors, flipped bits and bad input; a failure prints the command that repeats it.
TEST_campaign := $(BIN)/python -m tests.campaign --minutes $(MINUTES) --seed $(SEED) --jobs $(TEST_PROCESSES)
TEST_soak := $(BIN)/python -m tests.campaign.soak --minutes $(MINUTES)
TEST_load := $(BIN)/python -m tests.serve.load --minutes $(MINUTES)
ENV_serve := $(EXTRAS)/.ready
ENV_ray := $(RAY)/.ready
ENV_browser := $(EXTRAS)/.ready $(TOOLS)/.ready $(CHROMIUM)
ENV_docs := $(VENV)/.ready $(TOOLS)/.ready
ENV_levanter := $(LEVANTER)/.ready
ENV_gguf := $(GGUF)/.ready

test: $(or $(ENV_$(WHAT)),$(VENV)/.ready)
	@$(if $(TEST_$(WHAT)),echo "testing: $(WHAT)",echo "make test WHAT=$(WHAT): no such tests; make help lists them" >&2; exit 2)
	$(if $(filter gpu soak load campaign,$(WHAT)),,OMP_NUM_THREADS=1 )$(TEST_$(WHAT))

$(CHROMIUM):
	$(AS_ROOT) sh -c "apt-get update -qq && apt-get install -y -qq chromium"

# The clients of others and Playwright are large, and nothing but their tests needs them. litellm: newer ones need a
# filelock that other packages do not allow yet, which pip finds out version by version.
$(EXTRAS)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(EXTRAS): niels-gpt, litellm, langchain-openai, Playwright and axe (once)"
	@test -x $(EXTRAS)/bin/python || $(PYTHON) -m venv $(EXTRAS)
	@$(EXTRAS)/bin/python -m $(PIP) -e '.[dev,serve]' 'litellm<1.106.2' langchain-openai 'playwright>=1.49' 'axe-playwright-python>=0.1.4'
	@touch $@

# Ray and moto, with the above, leave pip too many versions to choose from.
$(RAY)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(RAY): niels-gpt, ray, s3fs and moto (once)"
	@test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	@$(RAY)/bin/python -m $(PIP) -e '.[dev,ray,s3]' 's3fs>=2026.6' 'moto[server]>=5'
	@touch $@

# JAX and Levanter have a separate environment: they are large, and nothing else imports them.
$(LEVANTER)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(LEVANTER): niels-gpt, Levanter and JAX (once; a few minutes)"
	@test -x $(LEVANTER)/bin/python || $(PYTHON) -m venv $(LEVANTER)
	@$(LEVANTER)/bin/python -m $(PIP) -e '.[dev,levanter]'
	@touch $@

# llama.cpp is compiled from the sdist of llama-cpp-python, so its tests have a separate environment.
$(GGUF)/.ready: pyproject.toml constraints.txt
	@echo "setting up $(GGUF): niels-gpt and llama-cpp-python (once; eight minutes)"
	@test -x $(GGUF)/bin/python || $(PYTHON) -m venv $(GGUF)
	@$(GGUF)/bin/python -m $(PIP) -e '.[dev,export]' 'llama-cpp-python[server]>=0.3.16'
	@touch $@

# The site needs neither torch nor niels-gpt: docstrings are read from the sources.
# Not with --quiet: it hides warnings from --strict.
docs: $(TOOLS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(TOOLS)/bin/python -m mkdocs build --strict
	@echo "site/index.html"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m scripts.structure
	@$(BIN)/python -m scripts.licences --quiet
	@$(MAKE) --no-print-directory audit

# Without a network, both lines say that the audit is skipped; a vulnerability that another version fixes is an error.
audit: setup
	@$(MAKE) --no-print-directory --silent tools 2>/dev/null || echo "vulnerabilities: pip-audit cannot be installed now"
	@$(BIN)/python -m scripts.audit_dependencies --tool $(TOOLS)/bin/pip-audit

# Tools that the project does not import have a separate environment: they would add 60 packages to $(VENV).
tools: $(TOOLS)/.ready

$(TOOLS)/.ready: pyproject.toml
	@echo "setting up $(TOOLS): pip-audit, build, mkdocs-material and mkdocstrings"
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" > $(TOOLS)/requirements.txt
	@$(TOOLS)/bin/python -m $(PIP) --retries 1 --timeout 15 pip-audit build -r $(TOOLS)/requirements.txt
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
	rm -rf .venv .venv-* dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
