# Every target sets itself up in .venv; a second call finds it ready. Variables:
#   PYTHON    the interpreter .venv is made with (3.11 or newer)
#   TORCH     the torch version to install
#   PIP_ARGS  more arguments for pip, such as the smaller CPU build of torch:
#             make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   SEED      of the made-up task and the runs of make rlhf
PYTHON ?= python3
TORCH ?= 2.13.0
PIP_ARGS ?=
SEED ?= 0

VENV := .venv
BIN := $(VENV)/bin
CHECKED := $(wildcard headrace tests examples benchmarks)

.DELETE_ON_ERROR:
.PHONY: help demo rlhf test lint types test-slow test-learn test-gpu docs clean

help:
	@echo "make demo        train a small model from nothing to a skill, on one CPU"
	@echo "make rlhf        SFT, reward model and PPO, and DPO, on a made-up task (minutes)"
	@echo "make test        the tests, without the long ones and those for a GPU"
	@echo "make lint        ruff: rules and format"
	@echo "make types       mypy"
	@echo "make test-slow   kill runs again and again, and resume them (minutes)"
	@echo "make test-learn  train until held-out accuracy rises (minutes)"
	@echo "make test-gpu    the tests that need a CUDA device"
	@echo "make docs        write docs/metrics.md and docs/configuration.md anew"
	@echo "make clean       remove caches, builds, demo_run/, rlhf_run/ and tools_run/ (keeps .venv and runs/)"

demo: $(VENV)/.base
	$(BIN)/python examples/arithmetic/demo.py

rlhf: $(VENV)/.base
	$(BIN)/python examples/rlhf/make_task.py $(SEED)
	$(BIN)/headrace sft examples/rlhf/sft.yaml run.overwrite=true run.seed=$(SEED)
	$(BIN)/headrace reward-model examples/rlhf/reward_model.yaml run.overwrite=true run.seed=$(SEED)
	$(BIN)/headrace train examples/rlhf/ppo.yaml run.overwrite=true run.seed=$(SEED)
	$(BIN)/headrace dpo examples/rlhf/dpo.yaml run.overwrite=true run.seed=$(SEED)
	$(BIN)/python examples/rlhf/compare.py

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not learn and not gpu and not slow"

lint: $(VENV)/.dev
	$(BIN)/python -m ruff check $(CHECKED)
	$(BIN)/python -m ruff format --check $(CHECKED)

types: $(VENV)/.dev
	$(BIN)/python -m mypy

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

test-learn: $(VENV)/.dev
	$(BIN)/python -m pytest -m learn

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

# through a temporary file: a failure must not leave half a page
docs: $(VENV)/.base
	$(BIN)/python -m headrace.observe.metrics > docs/metrics.md.new
	mv docs/metrics.md.new docs/metrics.md
	$(BIN)/python -m headrace.config_page > docs/configuration.md.new
	mv docs/configuration.md.new docs/configuration.md

clean:
	rm -rf build dist demo_run rlhf_run tools_run .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CHECKED) -type d -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.created:
	@command -v "$(PYTHON)" > /dev/null || { \
	  echo "headrace: '$(PYTHON)' was not found; name a Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "headrace: needs Python 3.11 or newer, but '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1); name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV)
	@touch $@

# torch first and alone, so that no other package chooses its version
$(VENV)/.base: pyproject.toml | $(VENV)/.created
	$(BIN)/python -m pip install $(PIP_ARGS) "torch==$(TORCH)"
	$(BIN)/python -m pip install $(PIP_ARGS) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install $(PIP_ARGS) -e ".[dev]"
	@touch $@
