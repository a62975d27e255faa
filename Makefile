# One command each. `make serve` and `make test` work as the first thing in a fresh clone and
# do nothing that is already done: the stamps in .venv say what is installed and from what.
#
# Set-up has stages, so that serving does not wait for torch and the development tools:
#   .venv/serve.stamp   the package with its native module, and what serving needs
#   .venv/dev.stamp     on top of it, all that tests, lint and benchmarks need
#   .venv/browser.stamp Chromium from apt, if we are root: the tests of the page use it
#
# ARGS goes to the command behind the target: make serve ARGS="--port 9000",
# make test ARGS="-m 'not slow' tests/core".

SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(firstword $(foreach name,python3.11 python3 python3.12 python3.13,\
  $(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NATIVE := CMakeLists.txt $(shell find src/hotbatch/kernels -name '*.cpp' -o -name '*.h' -o -name '*.inc')
# Built without isolation: the tools come in the pinned versions, and the build folder can be
# reused, so that a change to one source compiles that source only.
BUILD_TOOLS := scikit-build-core nanobind \
  $(if $(shell command -v cmake),,cmake) $(if $(shell command -v ninja),,ninja)
INSTALL := $(PIP) --no-build-isolation -e

.PHONY: help setup serve demo test lint bench clean

help:
	@echo 'make serve   serve the embedded model on http://127.0.0.1:8000'
	@echo 'make demo    static against continuous batching under a burst of clients'
	@echo 'make test    run all tests'
	@echo 'make lint    ruff, mypy, import-linter'
	@echo 'make bench   kernels, steps and quality on this machine'
	@echo 'make setup   everything for development'
	@echo 'make clean   remove what was built, .venv too'

setup: .venv/dev.stamp .venv/browser.stamp

serve: .venv/serve.stamp
	@exec $(BIN)/hotbatch serve $(ARGS)

demo: .venv/dev.stamp
	@mkdir -p out
	@exec $(BIN)/hotbatch bench demo --image out/burst.png $(ARGS)

test: .venv/dev.stamp .venv/browser.stamp
	@exec $(BIN)/python -m pytest $(ARGS)

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# Takes minutes and wants the machine for itself. `hotbatch bench serve` measures a server.
bench: .venv/dev.stamp
	@mkdir -p out
	$(BIN)/python benchmarks/overhead/plan_commit.py
	$(BIN)/python benchmarks/kernels/linear.py --models smollm2-135m
	$(BIN)/python benchmarks/step/step_time.py --plot out/step.png
	$(BIN)/python benchmarks/quality/perplexity.py

clean:
	rm -rf .venv build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

.venv/pyvenv.cfg:
	@$(if $(PYTHON),,echo 'hotbatch needs Python 3.11 or newer: apt-get install python3' >&2; exit 1)
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo 'Python lacks venv: apt-get install python3-venv' >&2; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; \
	  sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || \
	  { echo 'Python lacks its headers: apt-get install python3-dev' >&2; exit 1; }
	@command -v "$${CXX:-g++}" >/dev/null || \
	  { echo 'There is no C++ compiler: apt-get install g++' >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/tools.stamp: .venv/pyvenv.cfg constraints.txt
	@echo 'Setting up .venv: the build tools'
	@$(PIP) $(BUILD_TOOLS)
	@touch $@

.venv/serve.stamp: .venv/tools.stamp pyproject.toml $(NATIVE)
	@echo 'Setting up .venv: hotbatch, its native kernels, and what serving needs'
	@$(INSTALL) .
	@touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/serve.stamp
	@echo 'Setting up .venv: what tests, lint and benchmarks need (torch is large)'
	@$(INSTALL) '.[dev]'
	@touch $@

# The page's tests want a real browser. Where there is none and it cannot be had this way, they
# say so and are skipped.
.venv/browser.stamp: | .venv/dev.stamp
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    echo 'Setting up Chromium, for the tests of the page' && apt-get -qq update && \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends \
	      chromium fonts-dejavu-core >/dev/null 2>&1; } || \
	  echo 'No Chromium: the tests of the page will be skipped (apt-get install chromium)'
	@touch $@
