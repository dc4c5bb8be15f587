# make demo        see what it does (a fresh CPU machine is enough)
# make test        build the wheel, lint, types, tests: what CI runs
# make dev         an editable environment in .venv, for working on Lamella
# make native      rebuild the native libraries of the editable environment
# make lint        ruff and mypy --strict
# make test-vllm   the connector inside a real vLLM engine, its CPU build (Python 3.11, 1.9 GB): the rest of what CI runs
# make test-slow   the slow tests as well, with the nightly Hypothesis profile
#
# demo, test and lint use .venv-wheel, which holds the built wheel and never your editable install.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
ENV := .venv-wheel
DEV := .venv
WINDOWS := $(addprefix tests/with_vllm/test_,windows.py windows_of_hits.py)
AHEAD := $(WINDOWS) $(addprefix tests/with_vllm/test_,safety.py refusals.py exactness.py drafts.py)
.DEFAULT_GOAL := help
.PHONY: help prepare demo test test-slow test-vllm lint dev native clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile

prepare:
	@.ci/prepare $(ENV)

demo: prepare
	@PATH="$$PWD/$(ENV)/bin:$$PATH" MPLBACKEND=Agg examples/demo.sh out/demo

lint: prepare
	@echo "== ruff"
	@$(ENV)/bin/ruff check --output-format concise .
	@$(ENV)/bin/ruff format --check .
	@echo "== mypy --strict on the built wheel"
	@rm -rf build/typed && $(ENV)/bin/pip install -qq --no-deps --target build/typed dist/*.whl
	@cd build && MYPYPATH=typed ../$(ENV)/bin/mypy --config-file ../pyproject.toml \
		--python-executable ../$(ENV)/bin/python --cache-dir ../.mypy_cache -p lamella

test: lint
	@.ci/services
	@echo "== pytest, on the installed wheel"
	@HYPOTHESIS_PROFILE=ci LAMELLA_WHEEL=$$(echo dist/*.whl) $(ENV)/bin/pytest -m "not slow"

test-slow: lint
	@.ci/services
	@HYPOTHESIS_PROFILE=nightly LAMELLA_WHEEL=$$(echo dist/*.whl) $(ENV)/bin/pytest --timeout 3600

test-vllm: prepare
	@.ci/prepare-vllm .venv-vllm-wheel
	@echo "== pytest inside real vLLM, one step after another"
	@.venv-vllm-wheel/bin/pytest -p no:asyncio tests/with_vllm
	@echo "== pytest inside real vLLM, steps scheduled ahead"
	@.venv-vllm-wheel/bin/pytest -p no:asyncio -p with_vllm.ahead_on_cpu $(AHEAD) tests/with_vllm/test_auto_ahead.py
	@echo "== pytest inside real vLLM, steps scheduled ahead, requests let run before anything of their loads has landed"
	@.venv-vllm-wheel/bin/pytest -p no:asyncio -p with_vllm.ahead_on_cpu -p with_vllm.released_by_forecast $(WINDOWS)
	@echo "== pytest inside real vLLM, steps scheduled ahead, decoding steps that pass for full graphs"
	@.venv-vllm-wheel/bin/pytest -p no:asyncio -p with_vllm.ahead_on_cpu -p with_vllm.full_graphs_before $(AHEAD)

dev:
	@echo "== installing what pyproject.toml asks for into $(DEV): some minutes"
	@test -x $(DEV)/bin/pip || $${PYTHON:-python3} -m venv $(DEV)
	@$(DEV)/bin/pip install -qq --upgrade pip "scikit-build-core>=1.0" "cmake>=3.24" "ninja>=1.11"
	@$(DEV)/bin/pip install -qq --no-build-isolation -e ".[dev,plot,parquet,redis,s3,server]"
	@echo "== $(DEV) is ready; after changing native code run: make native"

native:
	@$(DEV)/bin/pip install -qq --no-build-isolation --no-deps -e .

clean:
	rm -rf build dist .venv-wheel .venv-vllm-wheel .mypy_cache .ruff_cache .pytest_cache .hypothesis out
