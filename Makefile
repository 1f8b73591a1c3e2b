# Needs Python (3.11 or newer) and make, nothing else: every other tool is installed into $(VENV).

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Four workers, for a machine of two cores: tests also wait, for threads and other processes. A file goes to one of them
# as a whole, so that what its fixtures compile and run is made once.
PYTEST_ARGS ?= -n 4 --dist loadfile
# What `make mutants` samples.
SAMPLE ?= 4
SEED ?= 0
MINUTES ?= 60
ONLY ?= *

# XLA's CPU client sizes its thread pool from NPROC when it is created. A collective blocks one thread per device until
# all have arrived, so with eight virtual devices on few cores JAX can hang in the rendezvous of an all-reduce.
export NPROC := 32

# Tests start hundreds of processes. What one of them compiled of the package and of the tests, the others read.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
TELL_VERSION := -c 'import platform, sys; print(platform.python_version() if sys.version_info >= (3, 11) else "")'
PYVERSION := $(shell $(PYTHON) $(TELL_VERSION) </dev/null 2>/dev/null)

# The stamps carry the version of the interpreter, so that another PYTHON makes another environment; and the extras are
# stamped one by one, so that the tests do not wait for tools which only `check` needs.
ENV := $(VENV)/.python-$(PYVERSION)
INSTALLED := $(VENV)/.installed-$(PYVERSION)

.PHONY: help demo demo-distributed test system soak check bench truth docs notebooks mutants clean
.DELETE_ON_ERROR:

help:
	@echo "make demo   train a small character model (ARGS='...' are its arguments)"
	@echo "make demo-distributed  train in two processes, kill one, go on, and compare (ARGS='...' are its arguments)"
	@echo "make test   run the tests and doctests that every change needs (PYTEST_ARGS='...' replaces '-n 4 --dist loadfile')"
	@echo "make system run the tests of whole systems: demo, notebooks, third-party models, processes"
	@echo "make soak   run the random tests ten times as long, on other examples each time"
	@echo "make check  run the linter, the formatter's check, the house rules and the type checker"
	@echo "make bench  compare partjit with jax.jit (ARGS='...' are passed on)"
	@echo "make truth  compare reports on third-party models with what XLA compiles (ARGS='...' are passed on)"
	@echo "make docs   run what the tables in docs/transformations.md, meshes.md and features.md show, and write them"
	@echo "make notebooks  write the notebooks from their texts, and run them"
	@echo "make mutants  change the package a little, time and again, and see whether the tests notice (SAMPLE=4 mutants of each"
	@echo "            module, SEED=0 says which, MINUTES=60 bounds the time, ONLY='partjit/opsharding/*' picks modules)"
	@echo "make clean  remove the environments, caches and build products"
	@echo "PYTHON=python3.12 picks the interpreter, VENV=.venv the environment."

demo: $(INSTALLED)-viz
	$(BIN)/python examples/train_char_lm.py $(ARGS)

demo-distributed: $(INSTALLED)-viz
	$(BIN)/python examples/kill_and_resume.py $(ARGS)

test: $(INSTALLED)-testing
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not system" --ignore=tests/system

system: $(INSTALLED)-testing $(INSTALLED)-models $(INSTALLED)-notebooks
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m system tests

soak: $(INSTALLED)-testing
	PARTJIT_PROFILE=soak $(BIN)/python -m pytest $(PYTEST_ARGS) -m "hypothesis or soak" --ignore=tests/system

# The type checker is told the interpreter here, since VENV may differ from what pyproject.toml names.
check: $(INSTALLED)-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python tests/project/house_rules.py
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

bench: $(INSTALLED)-testing
	$(BIN)/python benchmarks/dispatch.py $(ARGS)
	$(BIN)/python benchmarks/cold.py $(ARGS)
	$(BIN)/python benchmarks/imports.py
	$(BIN)/python benchmarks/opsharding.py
	$(BIN)/python benchmarks/colocated.py
	$(BIN)/python benchmarks/isolation.py
	$(BIN)/python benchmarks/processes.py
	$(BIN)/python benchmarks/journal.py
	$(BIN)/python benchmarks/callbacks.py
	$(BIN)/python benchmarks/programs.py
	$(BIN)/python benchmarks/loops.py
	$(BIN)/python benchmarks/everyday.py
	$(BIN)/python benchmarks/sweep.py
	$(BIN)/python benchmarks/explain.py
	$(BIN)/python benchmarks/what_if.py

truth: $(INSTALLED)-truth
	$(BIN)/python benchmarks/truth.py $(ARGS)

docs: $(INSTALLED)-base
	$(BIN)/python docs/transformations.py $(ARGS)
	$(BIN)/python docs/meshes.py $(ARGS)
	$(BIN)/python docs/features.py $(ARGS)

notebooks: $(INSTALLED)-testing $(INSTALLED)-notebooks
	$(BIN)/python notebooks/write_pairs.py
	$(BIN)/python -m pytest $(PYTEST_ARGS) tests/system/test_notebooks.py

mutants: $(INSTALLED)-testing $(INSTALLED)-mutation
	$(BIN)/python -m mutation --sample '$(SAMPLE)' --seed '$(SEED)' --minutes '$(MINUTES)' --only '$(ONLY)' $(ARGS)

clean:
	rm -rf .venv* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .jax_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED)-base: pyproject.toml $(ENV)
	$(PIP) -e .
	@touch $@

$(INSTALLED)-%: pyproject.toml $(ENV)
	$(PIP) -e '.[$*]'
	@touch $@

$(ENV):
	@test -n "$(PYVERSION)" || { echo "partjit needs Python 3.11 or newer; $(PYTHON) is older or does not run (set PYTHON=...)" >&2; exit 1; }
	@test "$$($(BIN)/python $(TELL_VERSION) 2>/dev/null)" = "$(PYVERSION)" && $(BIN)/python -m pip --version >/dev/null 2>&1 \
		|| $(PYTHON) -m venv --clear $(VENV)
	@touch $@
