# Tools for working on jaxmux: `make` lists the targets.
#
# PYTHON=       the interpreter of the main environment (3.12 or later)
# PEFT_PYTHON=  the interpreter of the peft environment (3.11 or later)
# TORCH_INDEX=  a package index for torch alone, if the default index has no
#               build for the CPU: https://download.pytorch.org/whl/cpu
# WORKERS=      the number of processes of pytest; default: 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-one-device test-devices test-slow test-peft test-trackers test-ui lint format docs docs-test clean

PYENV_PYTHON = $(sort $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(1)*/bin/python3))

# The constraints were made with Python 3.12 and 3.11, so these are tried first.
PYTHONS = $(or $(PYTHON),python3.12 python3.13 python3.14 python3 python $(call PYENV_PYTHON,3.1[2-9]))
PEFT_PYTHONS = $(or $(PEFT_PYTHON),python3.11 $(call PYENV_PYTHON,3.11) $(PYTHONS))

# $(call create-venv,folder,minor,candidates,variable) creates an empty
# environment in `folder` with the first candidate that runs, has ensurepip and
# is Python 3.minor or later. A shim of pyenv may not run, and some systems ship
# Python without ensurepip. The error message names the make variable `variable`,
# with which a user can choose the interpreter.
define create-venv
@for python in $(3); do \
	"$$python" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, $(2)))' 2>/dev/null || continue; \
	echo "creating $(1) with $$("$$python" --version)"; \
	exec "$$python" -m venv --clear $(1); \
done; \
echo "No Python 3.$(2) or later with ensurepip among: $(3)" >&2; \
echo "Install one, or name it: make $(MAKECMDGOALS) $(4)=/path/to/python3" >&2; \
exit 1
endef

MAIN = .venv/bin
PEFT = .venv-peft/bin
# Most of the installed files are never imported. The others are compiled when they are.
PIP_INSTALL = pip install -qq --disable-pip-version-check --no-compile

.venv/installed: pyproject.toml constraints.txt
	$(call create-venv,.venv,12,$(PYTHONS),PYTHON)
	$(MAIN)/$(PIP_INSTALL) --constraint constraints.txt --editable '.[test]'
	@touch $@

.venv-peft/installed: constraints-peft.txt
	$(call create-venv,.venv-peft,11,$(PEFT_PYTHONS),PEFT_PYTHON)
ifdef TORCH_INDEX
	$(PEFT)/$(PIP_INSTALL) --constraint constraints-peft.txt --no-deps --index-url $(TORCH_INDEX) torch
endif
	$(PEFT)/$(PIP_INSTALL) --constraint constraints-peft.txt torch transformers peft bitsandbytes \
		compressed-tensors trl safetensors numpy pytest
	@touch $@

# The newest versions, because both packages speak to servers that change.
.venv-trackers/installed: pyproject.toml constraints.txt
	$(call create-venv,.venv-trackers,12,$(PYTHONS),PYTHON)
	.venv-trackers/bin/$(PIP_INSTALL) --constraint constraints.txt --editable '.[test,wandb,mlflow]'

.venv/docs-installed: .venv/installed constraints-docs.txt
	$(MAIN)/$(PIP_INSTALL) --constraint constraints.txt --constraint constraints-docs.txt \
		--editable '.[docs]'
	@touch $@

WORKERS = 2

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile | expand -t 22

demo: .venv/installed ## train, evaluate and export the bundled demo (about 3 minutes)
	$(MAIN)/python -m jaxmux.train

PYTEST = $(MAIN)/pytest -n $(WORKERS) --dist loadfile --timeout 300

test: .venv/installed ## run the fast tests, each below a second, on the CPU
	$(PYTEST) -m "not gpu and not slow and not long"

test-all: test-one-device test-devices test-peft ## run what CI runs, everything on the CPU

# Fails fast tests that are not fast: 1.5 s of CPU time on a quiet machine, twice as much on a busy one.
test-one-device: .venv/installed ## run the fast and the long tests of one device
	$(PYTEST) --most-seconds 3

test-devices: .venv/installed ## run the tests of several devices, eight parts of the CPU
	JAXMUX_TEST_DEVICES=8 $(PYTEST) tests/engine/several_devices tests/runs/several_devices

TEST_PEFT = JAXMUX_PYTHON=$(CURDIR)/$(MAIN)/python $(PEFT)/pytest tests/parity
SLOW = -n $(WORKERS) --timeout 600 -m "slow and not gpu"

test-slow: .venv/installed .venv-peft/installed ## run what CI leaves out: more meshes, shapes, benchmarks
	$(MAIN)/pytest $(SLOW) --ignore tests/docs
	JAXMUX_TEST_DEVICES=8 $(MAIN)/pytest $(SLOW) \
		tests/engine/several_devices tests/runs/several_devices
	$(TEST_PEFT) -m "slow and not gpu"

test-peft: .venv/installed .venv-peft/installed ## compare with transformers, PEFT and others
	$(TEST_PEFT)

test-trackers: .venv-trackers/installed ## log to Weights & Biases and MLflow, without a network
	.venv-trackers/bin/pytest tests/runs/trackers

test-ui: .venv/installed ## test the page of a run in Chromium (apt-get install chromium)
	$(MAIN)/pytest tests/ui/browser --timeout 120

lint: .venv/installed ## check style and formatting
	$(MAIN)/ruff check .
	$(MAIN)/ruff format --check .

format: .venv/installed ## sort imports, fix what can be fixed, format
	$(MAIN)/ruff check --fix .
	$(MAIN)/ruff format .

docs: .venv/docs-installed ## build the documentation as a site
	$(MAIN)/sphinx-build -q -E -n -W --keep-going -b html docs build/docs
	@echo "open build/docs/index.html"

docs-test: .venv/docs-installed ## run every snippet of the documentation (about 10 minutes)
	$(MAIN)/pytest --timeout 600 -m "not gpu" tests/docs

clean: ## remove environments and caches, but no training runs
	rm -rf .venv .venv-peft .venv-trackers .cache .pytest_cache .ruff_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
