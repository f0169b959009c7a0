# Two commands for a fresh machine with Python 3.11+: `make train`, `make test`. Both install what they need first.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
PEER := .venv-trl
VLLM := .venv-vllm

# A file's tests share a process, and its fixtures; up to four processes, one more than cores, for many tests wait.
WORKERS = $(shell expr 1 + $$(getconf _NPROCESSORS_ONLN))
PYTEST = $(VENV)/bin/python -m pytest --numprocesses $(WORKERS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

# What needs a server of `make vllm`, the model of `make smollm2`, or minutes.
REAL := tests/test_real_model.py tests/test_pretended_gpu.py tests/test_engines_end_to_end.py $(addprefix tests/engine/server/,test_vllm.py test_vllm_experts.py test_vllm_process.py test_vllm_teacher.py)

# Runs that are broken off in each of their parts. Those of tools, agents, sources, adapters and others are in `make test`.
BROKEN_OFF := tests/run/test_resume_exact.py tests/run/test_resume_auxiliary_models.py

.PHONY: train test test-rest test-all faults lint format docs bench smollm2 soak study vllm install clean

train: $(INSTALLED)  ## teach a small mixture-of-experts model arithmetic by GSPO (about 4 minutes on 2 cores)
	$(VENV)/bin/gspo train recipes/arithmetic.yaml $(ARGS)

test: $(INSTALLED)  ## what to run before each commit: all but what `make test-rest` and tests/nightly.txt have (about 10 minutes on 2 cores)
	$(PYTEST) -m "not browser$(if $(NIGHTLY),, and not nightly)" $(addprefix --ignore=,tests/faults tests/launch $(BROKEN_OFF) $(REAL)) $(ARGS)

faults: $(INSTALLED)  ## the fault matrix of docs/guides/resuming.md: real runs, killed and damaged, of one process and of several (about 8 minutes on 2 cores)
	$(PYTEST) --dist load tests/faults $(BROKEN_OFF) $(ARGS)
	$(PYTEST) tests/launch $(ARGS)

test-rest: $(INSTALLED)  ## what `make test` leaves out: the fault matrix, runs broken off in each part, the launchers, the browser, and servers of `make vllm`
	$(PYTEST) -m "$(if $(NIGHTLY),,not nightly)" tests/faults tests/launch $(BROKEN_OFF) tests/report/page/test_browser_*.py $(REAL) $(ARGS)

test-all:  ## both, one after the other, with all of tests/nightly.txt and the shapes of all tensors checked (about 40 minutes on 2 cores, with `make vllm`)
	SHAPES=all $(MAKE) test NIGHTLY=1
	SHAPES=all $(MAKE) test-rest NIGHTLY=1

lint: $(INSTALLED)  ## style, formatting and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(INSTALLED)  ## the documentation's site, into site/; fails on a dead link (some seconds)
	$(VENV)/bin/python docs/make_reference.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict $(ARGS)

bench: $(INSTALLED) $(PEER)/.installed  ## against TRL's GSPO, taking turns (about 16 minutes on 2 quiet cores)
	$(VENV)/bin/python -m benchmarks.peer.compare --trl-python $(PEER)/bin/python $(ARGS)

soak: $(INSTALLED)  ## 300 steps, killed at random times; must end as an unbroken run does (about a minute)
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m tests.faults.soak $(ARGS)

STUDY ?= gspo_vs_grpo
study: $(INSTALLED)  ## STUDY=gspo_vs_grpo (about an hour on 2 cores), objectives (35 minutes), staleness (an hour), turns (half an hour), growth (20 minutes), sampler (40 minutes) or engine_likelihoods (40 minutes, make vllm first): what has no result yet, then its page
	$(VENV)/bin/python -m studies.$(STUDY).run $(ARGS)
	$(VENV)/bin/python -m studies.$(STUDY).page

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "gspo needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

$(PEER)/.installed: constraints.txt benchmarks/peer/requirements.txt
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/pip install --quiet --no-compile --constraint constraints.txt --requirement benchmarks/peer/requirements.txt
	touch $@

smollm2: models/smollm2-135m/config.json  ## a real language model of 135M parameters (93 MB are downloaded), into models/smollm2-135m

models/smollm2-135m/config.json: | $(INSTALLED)
	$(VENV)/bin/gspo get smollm2-135m --out models/smollm2-135m

# vLLM wants an environment of its own. This is its build for CPUs; docs/engines.md says what to install for a GPU.
vllm: $(VLLM)/.installed  ## a vLLM server for this CPU, which its tests need, into .venv-vllm (about 2 minutes)

$(VLLM)/.installed: tests/install_vllm.sh
	PYTHON=$(PYTHON) bash tests/install_vllm.sh $(VLLM)
	touch $@

clean:
	rm -rf $(VENV) $(PEER) $(VLLM) .mypy_cache .ruff_cache .pytest_cache site
