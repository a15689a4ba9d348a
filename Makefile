# Everything runs in .venv, which the first target that needs it creates from pyproject.toml and constraints.txt.
# ARGS is handed on, for example: make test ARGS="-k gemm"

PYTHON ?= python3
ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest -n 2 --dist worksteal
CODE := glass_jax models benchmarks tests

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-all bench lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/installed ## train a small DeepSeek model, replay steps on the NPU model, export it for Ascend
	$(RUN) -m models.train $(ARGS)

quick: $(VENV)/installed ## run one case of each test that is not long, for the loop of a person at work
	$(PYTEST) --quick -m "not slow" $(ARGS)

test: $(VENV)/installed ## run the tests, without the slow sweeps
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(VENV)/installed ## run the tests, slow sweeps included
	$(PYTEST) $(ARGS)

bench: $(VENV)/installed ## measure every promise on speed, both sides in one run
	$(RUN) -m benchmarks $(ARGS)

lint: $(VENV)/installed ## check style
	$(RUN) -m ruff check $(CODE)
	$(RUN) -m ruff format --check $(CODE)

format: $(VENV)/installed ## fix style
	$(RUN) -m ruff check --fix $(CODE)
	$(RUN) -m ruff format $(CODE)

clean: ## remove .venv and everything else that the targets above wrote
	rm -rf $(VENV) build dist runs *.egg-info .cache .pytest_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# Always with the constraints: without them pip takes a CUDA build of torch, several gigabytes, where a CPU build serves.
$(VENV)/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "glass_jax needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11"; exit 1; }
	@echo "Setting up $(VENV), once; this takes a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[tilelang,demo,parity,test,dev]'
	@touch $@
