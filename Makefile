# Everything runs from a fresh clone with only Python 3.11+ and make; nothing is installed outside
# of .venv. Variables, all optional, on the command line:
#   PYTHON=python3.12     the interpreter that .venv is made with
#   PIP_ARGS="..."        handed to pip, such as --extra-index-url of the CPU-only builds of torch
#   PYTEST_ARGS="..."     handed to pytest by `make test` and `make gate`
PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
VENV := .venv
PIP_INSTALL := $(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt $(PIP_ARGS)

.PHONY: help demo test gate clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile
	@echo 'Without a GPU, keep pip from fetching a CUDA-sized torch: take the address of the CPU builds'
	@echo 'from the "Get started" page of pytorch.org, and pass PIP_ARGS="--extra-index-url ADDRESS".'

demo: $(VENV)/.installed-train  ## capture, profile, plan and train the demo model on this machine
	$(VENV)/bin/dapple train examples/demo.toml

test: $(VENV)/.installed-dev gate  ## set up, then run the whole gate and the tests

gate: $(VENV)/.installed-dev  ## format, lint, types, import direction, tests
	PYTEST_ARGS="$(PYTEST_ARGS)" scripts/gate $(VENV)/bin

clean:  ## remove .venv, caches and runs
	rm -rf $(VENV) runs build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are newer than what they were installed from; [dev] brings all of [train]. pip compiles
# what it installs, but not what it links to; without, every start takes a fifth of a second longer.
$(VENV)/.installed-dev: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(PIP_INSTALL) --no-build-isolation -e '.[dev]'
	@$(VENV)/bin/python -m compileall -q src
	@touch $(VENV)/.installed-train $@

$(VENV)/.installed-train: $(VENV)/bin/pip pyproject.toml constraints.txt
	$(PIP_INSTALL) --no-build-isolation -e '.[train]'
	@$(VENV)/bin/python -m compileall -q src
	@touch $@

# pip is the last thing that venv makes, so a half-made .venv is made again. The build backend comes
# from the constraints as well (hence --no-build-isolation above).
$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "dapple needs Python 3.11 or newer, and '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>/dev/null || echo missing); pass another one:" \
	    "make $(or $(MAKECMDGOALS),test) PYTHON=python3.11" >&2; exit 1; }
	@echo "making $(VENV) and installing into it, which takes some minutes the first time"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP_INSTALL) setuptools
	@touch $@
