# One word per habit. `make serve` and `make test` set up all they need.
PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= models/demo
DEVICE ?= cpu
ENGINE ?= docker
SECONDS ?= 600
JOBS ?= 2
UV ?= $(shell command -v uv 2>/dev/null)
COUNT ?= 60
SEED ?= 14
BASE ?= main
INSTALL = $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/pip install --progress-bar on)
PARALLEL = -n $(JOBS) --dist worksteal
BIN := .venv/bin
SOURCES := engine server training loadtest research deploy tests srm
MOJO := mojo_kernels

unexport PYTHONDONTWRITEBYTECODE  # set in many images: each process of a test would compile all that it imports

.DEFAULT_GOAL := help
.PHONY: help setup serve fmt tables lint types test test-fast test-all test-gpu test-clients fuzz measures mutants kernels kernels-wide kernels-all gpu-kit gpu-kit-rehearsal image deploy-check-lint deploy-check deploy-check-all bench load-setup load attack peers-setup peers docs locks graphs wheel check clean

help:  ## the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.venv/serve: requirements/serve.lock
	@case "$$(uname -sm)" in "Linux x86_64") ;; \
	  "Linux "*) echo "srm is tested on x86-64 only. On $$(uname -m) it is untried; going on." ;; \
	  *) echo "srm runs on Linux. On $$(uname -s), run it in a container on an x86-64 machine: docs/deploy.md"; exit 1 ;; esac
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "srm needs Python 3.11 or newer; call make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "Installing the server (about 0.5 GB to download, once) ..."
	$(INSTALL) --require-hashes -r requirements/serve.lock
	$(INSTALL) --quiet --no-deps --editable .
	@touch $@

.venv/loadtest: .venv/serve requirements/loadtest.lock
	@echo "Installing what load tests need (about 25 MB to download, once) ..."
	$(INSTALL) --no-deps --require-hashes -r requirements/loadtest.lock
	@touch $@

.venv/dev: .venv/loadtest requirements/dev.lock requirements/torch.lock
	@echo "Installing what training and the tests need (torch among it) ..."
	$(BIN)/pip install --progress-bar on --no-deps --require-hashes -r requirements/dev.lock
	$(BIN)/pip install --progress-bar on -r requirements/torch.lock
	@touch $@

.venv/system: .venv/dev tests/install.sh
	@tests/install.sh
	@touch $@

setup: .venv/dev  ## a .venv with everything, torch and test tools included

serve: .venv/serve  ## installs what serving needs and runs `srm serve`: PORT=8123 MODEL=dir DEVICE=gpu make serve
	@$(BIN)/srm serve --model $(MODEL) --host $(HOST) --port $(PORT) --device $(DEVICE)

fmt: .venv/dev  ## formats Python and Mojo
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/mojo format $(MOJO)

tables: .venv/dev  ## writes the tables of docs/ that say what code and records have
	$(BIN)/python -m tests.tools.doc_tables
	$(BIN)/srm bench table

lint: .venv/dev  ## ruff, Mojo format and Mojo doc strings
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	tests/lint_mojo.sh $(BIN) $(MOJO)

types: .venv/dev  ## mypy --strict
	$(BIN)/mypy srm research deploy tests

test: .venv/system  ## all tests but the slow ones and those that need a GPU
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu and not clients"

test-fast: .venv/dev  ## the quick tests of what changed since BASE=main, in under a minute
	@BASE=$(BASE) $(BIN)/python -m tests.tools.changed

test-all: .venv/system  ## the slow ones too
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not clients"

test-gpu: .venv/dev  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu

fuzz: .venv/dev  ## property tests with fresh seeds, round after round, for SECONDS=600
	@end=$$(($$(date +%s) + $(SECONDS))); while [ $$(date +%s) -lt $$end ]; do \
	  $(BIN)/python -m pytest -q -x --hypothesis-profile=fuzz tests/property || exit 1; done

measures:  ## counts lines, words, folders and records, of the working tree or of COMMITS="..."
	@$(PYTHON) -m tests.tools.measures $(COMMITS)

mutants: .venv/dev  ## changes COUNT=60 single tokens, drawn with SEED=14, one at a time, and says which no test notices
	@COUNT=$(COUNT) SEED=$(SEED) JOBS=$(JOBS) $(BIN)/python -m tests.tools.mutants

attack: .venv/dev  ## half an hour of random requests, kills, full disks, flipped bits and clock jumps; needs root
	$(BIN)/python -m tests.attack.run

.venv-clients/ready: requirements/clients.lock requirements/torch.lock
	$(PYTHON) -m venv .venv-clients
	@echo "Installing other people's clients (about 0.6 GB to download with torch for a CPU, once) ..."
	.venv-clients/bin/pip install --progress-bar on --no-deps --require-hashes -r requirements/clients.lock
	.venv-clients/bin/pip install --progress-bar on -r requirements/torch.lock
	@touch $@

.venv-agents/ready: requirements/agents.lock tests/clients/programs/node/package-lock.json
	$(PYTHON) -m venv .venv-agents
	@echo "Installing agents and makers of typed outputs, whose versions do not go with those (0.2 GB, once) ..."
	.venv-agents/bin/pip install --progress-bar on --no-deps --require-hashes -r requirements/agents.lock
	mkdir -p .venv-agents/node && cp tests/clients/programs/node/package*.json .venv-agents/node
	! command -v npm || npm ci --no-audit --no-fund --prefix .venv-agents/node
	@touch $@

.venv-verifiers/ready: requirements/verifiers.lock
	$(PYTHON) -m venv .venv-verifiers
	@echo "Installing verifiers, which asks for an older openai than those (0.2 GB, once) ..."
	.venv-verifiers/bin/pip install --progress-bar on --no-deps --require-hashes -r requirements/verifiers.lock
	@touch $@

.venv-ray/ready: requirements/ray.lock requirements/torch.lock
	$(PYTHON) -m venv .venv-ray
	@echo "Installing Ray, and verl, which is made of it and asks for an older transformers (0.5 GB with torch for a CPU, once) ..."
	.venv-ray/bin/pip install --progress-bar on --no-deps --require-hashes -r requirements/ray.lock
	.venv-ray/bin/pip install --progress-bar on -r requirements/torch.lock
	@touch $@

test-clients: .venv/dev .venv-clients/ready .venv-agents/ready .venv-verifiers/ready .venv-ray/ready .venv-deploy/ready  ## other people's clients against a server, in venvs of their own; writes docs/clients-called.md
	CLIENTS_TABLE=1 $(BIN)/python -m pytest -m clients

kernels: .venv/dev  ## compiles every op for an H100 or H200, without one, and shows registers and spills
	$(BIN)/python -m tests.kit.ptx.compile_for_gpu
	$(BIN)/python -m tests.kit.ptx.cubin build/graphs/*.mef

kernels-wide: .venv/dev  ## the step graphs of widths 512 and 1,024 in bfloat16 and float8, minutes each
	$(BIN)/python -m tests.kit.ptx.compile_steps --d-model 512
	$(BIN)/python -m tests.kit.ptx.compile_steps --d-model 1024
	$(BIN)/python -m tests.kit.ptx.compile_steps --d-model 512 --dtype float8
	$(BIN)/python -m tests.kit.ptx.compile_steps --d-model 1024 --dtype float8
	$(BIN)/python -m tests.kit.ptx.cubin build/graphs/*.mef

kernels-all: .venv/dev  ## runs the PTX of every product of both benchmark widths in numpy, minutes
	$(BIN)/python -m pytest -q -m slow tests/kernels/gpu/test_products.py tests/kernels/gpu/test_cubin.py

gpu-kit: .venv/dev  ## packs what a GPU machine without MAX needs, graphs included, into build/gpu-kit
	$(BIN)/python -m deploy.gpu.pack

gpu-kit-rehearsal: .venv/dev  ## the kit's calls at small sizes on a fake driver that computes nothing, and their report
	$(BIN)/python -m pytest -q tests/fake_driver/test_kit.py

image:  ## the container image, as `srm`; ENGINE=podman for another builder than docker
	$(ENGINE) build -t srm --build-arg REVISION=$$(git rev-parse HEAD) .

deploy-check-lint: .venv/system  ## manifests, alerts, image and compose files, without running any of them
	$(BIN)/python -m deploy.kubernetes.check
	$(BIN)/python -m pytest -q tests/deploy/test_image.py tests/deploy/test_kubernetes.py tests/deploy/test_prometheus.py

deploy-check: deploy-check-lint image  ## the image built and run; ENGINE=podman without docker
	ENGINE=$(ENGINE) deploy/image/check.sh srm

.venv-deploy/ready: requirements/serve.lock
	$(PYTHON) -m venv .venv-deploy
	.venv-deploy/bin/pip install --progress-bar on --require-hashes -r requirements/serve.lock
	.venv-deploy/bin/pip install --progress-bar on vllm-router==0.1.17 "ray[data,serve]==2.60.0"
	@touch $@

deploy-check-all: deploy-check .venv-deploy/ready  ## a router before replicas that die, object storage
	$(BIN)/python -m tests.deploy.try_router --python .venv-deploy/bin/python
	ROUTER_PYTHON=.venv-deploy/bin/python $(BIN)/python -m pytest -q tests/deploy/test_discovery.py
	tests/deploy/object_storage.sh

bench: .venv/dev  ## measures kernels, engine, prompts and host; writes research/records/ and the pages' figures
	$(BIN)/srm bench kernels
	$(BIN)/srm bench engine
	$(BIN)/srm bench prefill
	$(BIN)/srm bench host
	$(BIN)/srm bench table

load-setup: .venv/loadtest  ## installs what `srm loadtest` needs, without torch

load: .venv/loadtest  ## a short load test of a server that it starts and stops: MODEL=dir
	$(BIN)/python -m tests.tools.load_local $(MODEL)

peers-setup: .venv/dev  ## installs other engines and makes the models of all, below ~/.cache/srm-peers
	$(BIN)/python -m research.bench.peers setup

peers: .venv/dev  ## measures them and ours in one run; writes research/records/
	$(BIN)/python -m research.bench.peers run

.venv-docs/ready: requirements/docs.lock
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --progress-bar on --require-hashes -r requirements/docs.lock
	@touch $@

docs: .venv-docs/ready  ## the pages as a site, in site/; a broken link fails
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet && echo "site/index.html: open it in a browser; it needs no network, nor does its search."

locks:  ## the hashes in all lock files but torch's, after a version there was changed
	$(PYTHON) -m venv .venv-locks
	.venv-locks/bin/pip install --quiet uv==0.13.9
	@for lock in $(filter-out requirements/torch.lock,$(wildcard requirements/*.lock deploy/image/*.lock deploy/kubernetes/router/*.lock)); do \
	  sed -n 's/^\([^ #]*==[^ ]*\).*/\1/p' $$lock > $$lock.in && .venv-locks/bin/uv pip compile --quiet --no-deps \
	    --generate-hashes --no-annotate --no-header $$lock.in > $$lock.new && mv $$lock.new $$lock || exit 1; rm $$lock.in; done

graphs: .venv/serve  ## the bundled model's graphs for processors, in models/graphs/, as a release has them
	@for target in x86-64-v3 x86-64-v4 cooperlake "cooperlake --dtype bfloat16"; do \
	  $(BIN)/python -m srm.engine.device.precompile --model models/demo --device cpu --output models/graphs --host-cpu $$target || exit 1; done
	$(BIN)/python -m srm.engine.device.graph_notes prune models/graphs

wheel: graphs  ## the wheel with the bundled model's graphs, in dist/
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

check: lint types docs test kernels  ## what CI runs: lint, types, docs, tests, kernels

clean:  ## removes environments, builds and caches
	rm -rf .venv .venv-clients .venv-agents .venv-verifiers .venv-ray .venv-problems .venv-docs .venv-locks .venv-deploy .venv-storage build dist models/graphs/* site .pytest_cache .mypy_cache .ruff_cache
