# graphsafe: `make help` lists the commands. Needs python3 >= 3.11 and make; everything else goes into .venv.
PYTHON ?= python3
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
PYTEST_ARGS ?= -q
# Files of tests run side by side in up to four processes of one thread of OpenMP each; one after the other where they share a GPU.
WORKERS ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 0 || echo auto)
BENCH_ARGS := -q --benchmark-only --benchmark-quiet -W ignore::DeprecationWarning
VERSIONS ?= 2.9.1 2.11.0 2.13.0 2.14.1 2.15.0

VENV := .venv
BIN := $(VENV)/bin
# A stamp a torch version and set of extras: while it is there and newer than these files, nothing is installed.
DEMO_ENV := $(VENV)/.installed-dflash-torch-$(TORCH)
TEST_ENV := $(VENV)/.installed-dev-torch-$(TORCH)
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-versions lint format type pytest bench bench-cuda clean

help:  ## this list
	@sed -n "s/^\([a-z-]*\):.*## */  \1 /p" Makefile | awk "{ name = \$$1; \$$1 = \"\"; printf \"  %-14s%s\\n\", name, \$$0 }"

demo: $(DEMO_ENV)  ## train a DFlash drafter for a small language model on this machine, and measure it
	$(BIN)/python -m examples.dflash demo $(ARGS)

test: lint type pytest  ## lint, types and tests; CUDA tests run where there is a GPU. TORCH=2.14.1 picks a torch

test-versions:  ## the tests on each of VERSIONS, one at a time in an environment that is removed again (gigabytes each)
	@failed=; for version in $(VERSIONS); do \
		echo "== torch $$version" >&2; \
		$(MAKE) --no-print-directory pytest VENV=.venv-$$version TORCH=$$version || failed="$$failed $$version"; \
		rm -rf .venv-$$version; \
	done; \
	if [ -n "$$failed" ]; then echo "the tests fail on torch$$failed" >&2; exit 1; fi

lint: $(TEST_ENV)  ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(TEST_ENV)  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(TEST_ENV)  ## mypy --strict on src
	$(BIN)/mypy

pytest: $(TEST_ENV)  ## the tests alone, with PYTEST_ARGS
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

# The CPU's figures are the same on a machine with GPUs, which are hidden from them.
bench: $(TEST_ENV)  ## benchmarks of the CPU's side, some minutes; ARGS="--benchmark-json bench.json" keeps the figures
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest benchmarks -m "not cuda and not slow" $(BENCH_ARGS) $(ARGS)

bench-cuda: $(TEST_ENV)  ## benchmarks that need a GPU, or measure it where there is one
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
		|| { echo "torch finds no CUDA device here; make bench measures the CPU's side" >&2; exit 1; }
	$(BIN)/python -m pytest benchmarks -m cuda $(BENCH_ARGS) $(ARGS)

clean:  ## remove the environment, caches and build products; runs/ stays
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "graphsafe needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and alone, so that no extra can pull in another build of it; then the project under the same constraint.
define install
	@echo "Installing torch $(TORCH) and the project into $(VENV) (some minutes the first time)" >&2
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[$(1)]'
	@for stamp in $(VENV)/.installed-*; do case $$stamp in *-torch-$(TORCH)) ;; *) rm -f $$stamp ;; esac; done
	@touch $@
endef

$(DEMO_ENV): $(INPUTS) | $(VENV)/bin/python
	$(call install,dflash)

$(TEST_ENV): $(INPUTS) | $(VENV)/bin/python
	$(call install,dev$(comma)dflash)
	@touch $(DEMO_ENV)

comma := ,
