# The doors of this project. `make` alone lists them; everything else is `.venv/bin/mtp --help`.
PYTHON ?= python3.11
EXTRAS ?= dev

BIN := .venv/bin
STAMP := .venv/.installed
MAKEFLAGS += --no-print-directory

# No dependency phones home (the same list as components/core/host.py; a test compares them).
export ORT_DISABLE_TELEMETRY ?= 1
export DO_NOT_TRACK ?= 1
export MLFLOW_DISABLE_TELEMETRY ?= true
export DVC_NO_ANALYTICS ?= 1
export GX_ANALYTICS_ENABLED ?= false
export HF_HUB_DISABLE_TELEMETRY ?= 1
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export GIT_PYTHON_REFRESH ?= quiet
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help repro test check ui install

help:
	@echo "make repro   fetch, distil, train, evaluate, export, verify, benchmark; prints the table of results"
	@echo "make test    the test suite"
	@echo "make check   lint, format and types"
	@echo "make ui      MLflow in the browser"
	@echo "make install .venv with the pinned packages; the others do it by themselves"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@bash .ci/install "$(PYTHON)" "$(EXTRAS)"

repro: $(STAMP)
	@$(BIN)/mtp repro

test: $(STAMP)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

ui: $(STAMP)
	@$(BIN)/mtp ui
