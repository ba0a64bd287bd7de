# One word per habit. `make serve` and `make test` set up all they need.
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= models/demo
DEVICE ?= cpu
BIN := .venv/bin
SOURCES := engine server training loadtest deploy tests srm.py
MOJO := mojo_kernels

.DEFAULT_GOAL := help
.PHONY: help setup serve fmt lint types test test-all test-gpu test-clients kernels gpu-kit bench load chaos agreement peers-setup peers check clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.venv/serve: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "srm needs Python 3.11 or newer; call make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "Installing the server (about 0.5 GB to download, once) ..."
	$(BIN)/pip install --progress-bar on -r requirements.lock
	@touch $@

.venv/dev: .venv/serve requirements-dev.lock
	@echo "Installing what training and the tests need (torch among it) ..."
	$(BIN)/pip install --progress-bar on -r requirements-dev.lock
	@touch $@

.venv/browser: .venv/dev tests/browser/install.sh
	@tests/browser/install.sh
	@touch $@

setup: .venv/dev  ## a .venv with everything

serve: .venv/serve  ## answer completions: PORT=8123 MODEL=dir DEVICE=cpu|gpu make serve
	@$(BIN)/python srm.py serve --model $(MODEL) --host $(HOST) --port $(PORT) --device $(DEVICE)

fmt: .venv/dev  ## format Python and Mojo
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/mojo format $(MOJO)

lint: .venv/dev  ## ruff, Mojo format and Mojo doc strings
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	tests/lint_mojo.sh $(BIN) $(MOJO)

types: .venv/dev  ## mypy --strict
	$(BIN)/mypy $(SOURCES)

test: .venv/browser  ## everything but the slow tests
	$(BIN)/python -m pytest -m "not slow and not gpu and not clients"

test-all: .venv/browser  ## the slow ones too
	$(BIN)/python -m pytest -m "not gpu and not clients"

test-gpu: .venv/dev  ## on a machine with a GPU
	$(BIN)/python -m pytest -m gpu

chaos: .venv/dev  ## kill processes at random during a job of 20,000 lines; writes docs/benchmarks/
	$(BIN)/python -m tests.chaos.run

.venv-clients/ready: requirements-clients.lock
	$(PYTHON) -m venv .venv-clients
	@echo "Installing other people's clients (about 0.6 GB to download with torch for a CPU, once) ..."
	.venv-clients/bin/pip install --progress-bar on -r requirements-clients.lock
	@touch $@

test-clients: .venv/dev .venv-clients/ready  ## lm-eval, TRL, guidellm and LangChain against a server
	$(BIN)/python -m pytest -m clients

agreement: .venv/dev .venv-clients/ready  ## load tests beside guidellm; writes docs/benchmarks/
	$(BIN)/python -m tests.clients.agreement

kernels: .venv/dev  ## compile ops and bf16 step graphs for an H100 or H200, without one
	$(BIN)/python -m tests.kernels.compile_for_gpu
	$(BIN)/python -m tests.kernels.compile_steps --d-model 512
	$(BIN)/python -m tests.kernels.compile_steps --d-model 1024

gpu-kit: .venv/dev  ## pack what a GPU machine without MAX needs, graphs included
	BIN=$(BIN) deploy/gpu/pack.sh

bench: .venv/dev  ## measure the engine on this machine; writes docs/benchmarks/
	$(BIN)/python srm.py bench kernels
	$(BIN)/python srm.py bench engine
	$(BIN)/python srm.py bench prefill
	$(BIN)/python srm.py bench host
	$(BIN)/python srm.py bench table

load: .venv/dev  ## a short load test of a server that is started here: MODEL=dir
	$(BIN)/python -m tests.load_local $(MODEL)

peers-setup: .venv/dev  ## other engines and all models, below ~/.cache/srm-peers
	$(BIN)/python -m loadtest.peers setup

peers: .venv/dev  ## measure them and ours in one run; writes docs/benchmarks/
	$(BIN)/python -m loadtest.peers run

check: lint types test kernels  ## what CI runs

clean:
	rm -rf .venv .venv-clients build dist .pytest_cache .mypy_cache .ruff_cache
