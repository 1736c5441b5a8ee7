# Two commands: `make serve` and `make test`. Both work from a bare checkout with Python 3.11 or newer and pip.
#
#   make serve [TOPOLOGY=topology/demo.toml] [MODEL=...] [ARGS="--port 8001"]
#   make test            everything but the full product of modes, which `make test-all` adds
#
# TORCH names what pip installs; on a CUDA box whose python already has torch, that torch is used instead.

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
TORCH ?= torch==2.13.0
VENV ?= .venv
TOPOLOGY ?= topology/demo.toml
MODEL ?=
ARGS ?=
PYTEST ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SUITABLE := import sys, torch; sys.exit(not torch.cuda.is_available() or tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))

# Ranks of tests and demos share few cores: one thread each is faster than many that wait for one another.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help serve pull test test-all check lint types imports unit full clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -6

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "==> $(VENV): a virtual environment of $$($(PYTHON) --version)"
	@if $(PYTHON) -c '$(SUITABLE)' 2>/dev/null; then \
		echo "    with the torch for CUDA that is here already"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi

$(VENV)/.torch: | $(VENV)/bin/python
	@if $(BIN)/python -c '$(SUITABLE)' 2>/dev/null; then :; else \
		echo "==> $(TORCH)"; $(PIP) install $(TORCH); fi
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	@echo "==> edgemesh"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.tested: pyproject.toml $(VENV)/.installed
	@echo "==> what the checks and tests need"
	@$(PIP) install --editable '.[test]'
	@touch $@

pull: $(VENV)/.installed
	@echo "==> the demo model"
	@$(BIN)/edgemesh pull smollm2-135m

serve: $(if $(MODEL),$(VENV)/.installed,pull)
	@echo "==> edgemesh start --topology $(TOPOLOGY) $(if $(MODEL),--model $(MODEL)) $(ARGS)"
	@exec $(BIN)/edgemesh start --topology $(TOPOLOGY) $(if $(MODEL),--model $(MODEL)) $(ARGS)

lint: $(VENV)/.tested
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.tested
	@echo "==> mypy --strict"
	@$(BIN)/mypy

imports: $(VENV)/.tested
	@echo "==> import-linter"
	@$(BIN)/lint-imports

# What fails is run once more, in a process and on meshes of its own, and both runs are shown: a fault of the code fails
# again, a moment in which something else had the machine does not.
define pytest
@$(BIN)/python -m pytest -m "$(1)" --durations 15 $(PYTEST) || { [ $$? -eq 1 ] && echo "==> once more, what failed" && \
	$(BIN)/python -m pytest -m "$(1)" --last-failed --last-failed-no-failures none $(PYTEST); }
endef

unit: pull $(VENV)/.tested
	@echo "==> pytest, all but the full product of modes"
	$(call pytest,not full)

full: pull $(VENV)/.tested
	@echo "==> pytest, the full product of modes"
	$(call pytest,full)

check: lint types imports

# One after the other and cheapest first, whatever -j says: the meshes of the tests want the cores for themselves.
test: | $(VENV)/.tested
	@$(MAKE) --no-print-directory -j1 check unit

test-all: | $(VENV)/.tested
	@$(MAKE) --no-print-directory -j1 check unit full

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
