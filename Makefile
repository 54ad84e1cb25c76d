# The lab in one word each. Windows has no make: README.md has the same in PowerShell.

PYTHON ?= python3
# More options for JupyterLab: make lab LAB_ARGS="--no-browser --port 8899"
LAB_ARGS ?=
export LAB_ARGS

SETUP = @$(PYTHON) lowprec_lab/bootstrap.py
ifeq ($(OS),Windows_NT)
BIN = .venv/Scripts
else
BIN = .venv/bin
endif

.DEFAULT_GOAL := help
.PHONY: help lab setup test test-quick lint notebooks bench gpu-check

help:
	@echo "make lab         set up (the first time) and open JupyterLab on chapter 00"
	@echo "make test        set up and run everything: ruff and all tests, a browser's included"
	@echo "make test-quick  the tests that need no browser and no patience (under 3 minutes)"
	@echo "make lint        ruff alone"
	@echo "make notebooks   build notebooks/ from solutions/"
	@echo "make bench       measure everything that has a stated bound"
	@echo "make gpu-check   what an NVIDIA GPU does with FP8: errors, results, speed (5 minutes; torch and numpy do)"

lab:
	$(SETUP) --extras peers --lab

setup:
	$(SETUP) --extras dev

# Chapter 14's scaler is compared with Megatron's own, whose file needs nothing that the package depends on.
test: lint
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --retries 1 \
		--timeout 10 "megatron-core>=0.12,<1" 2>/dev/null \
		|| echo "megatron-core could not be fetched: the one test that compares with it is skipped."
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-quick: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not browser and not slow"

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

notebooks: setup
	$(BIN)/python -m lowprec_lab build

bench: setup
	$(BIN)/python -m lowprec_lab bench --all

# No set-up: a bare machine with a GPU may have no network, and a torch of its own.
gpu-check:
	@$(if $(wildcard $(BIN)/python*),$(BIN)/python,$(PYTHON)) -m lowprec_lab gpu-check
