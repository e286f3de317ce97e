# make demo        train a GPT on real text in half the device memory that plain torch.compile needs, and draw the run:
#                  build/demo/report.html
# make test        the test suite                   make test-fast   without the slow tests
# make test-all    and all that repeats its tests in further combinations: dtypes, families, backends, schedules
# make lint        ruff, pyright, import-linter     make venv        only set up .venv
# make docs        the pages as a site, in build/site
#
# All of them work on a fresh machine with Python 3.11 or later, pip and a C++ compiler. What they need is installed into
# .venv once. Variables:
#   PYTHON     the interpreter to start from            DEMO_ARGS  arguments of examples/train_gpt.py
#   TORCH      what to install, such as torch==2.11.0   TEST_ARGS  arguments of pytest
#   RANKS      processes that share the demo's model
#   PARALLEL   pytest-xdist's arguments: a worker for every core, up to 4
#   PIP_ARGS   further arguments of every pip install

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?=
PIP_ARGS ?=
DEMO_ARGS ?=
RANKS ?= 1
TEST_ARGS ?=
PARALLEL ?= -n auto --maxprocesses 4

TORCH_VERSION := 2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet $(PIP_ARGS)

# Does the interpreter that we start from have a PyTorch of a version that we support and a GPU to run it on?
HAS_CUDA_TORCH := import torch; v = tuple(map(int, torch.__version__.split('.')[:2])); \
	assert (2, 11) <= v < (2, 16) and torch.cuda.is_available()

.PHONY: demo test test-all test-fast lint docs venv clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
ifeq ($(RANKS),1)
	$(BIN)/python examples/train_gpt.py $(DEMO_ARGS)
else
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/train_gpt_sharded.py $(DEMO_ARGS)
endif

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL) $(TEST_ARGS)

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "" $(PARALLEL) $(TEST_ARGS)

test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL) $(TEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

venv: $(VENV)/.installed-test

clean:
	rm -rf $(VENV) build *.egg-info

# Some distributions ship venv without ensurepip; then the outer pip installs one.
$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later found; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet $(PIP_ARGS) pip; }
	touch $@

# A CUDA build of PyTorch that works already is used where it is: its site-packages are put behind our own.
# Without an NVIDIA GPU the CPU build is installed: from the configured indexes, else from PyTorch's own.
$(VENV)/.installed-torch: $(VENV)/.created
	@set -e; \
	if [ -n "$(TORCH)" ]; then \
		echo "installing $(TORCH)"; $(PIP_INSTALL) "$(TORCH)"; \
	elif nvidia-smi -L >/dev/null 2>&1; then \
		if $(PYTHON) -c "$(HAS_CUDA_TORCH)" 2>/dev/null; then \
			echo "using the PyTorch of $(PYTHON)"; \
			$(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
				> "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer_torch.pth"; \
		else \
			echo "installing torch==$(TORCH_VERSION)"; $(PIP_INSTALL) "torch==$(TORCH_VERSION)"; \
		fi; \
	else \
		echo "installing torch==$(TORCH_VERSION), CPU build"; \
		$(PIP_INSTALL) "torch==$(TORCH_VERSION)+cpu" 2>/dev/null || \
		$(PIP_INSTALL) --extra-index-url $(CPU_INDEX) "torch==$(TORCH_VERSION)+cpu" || \
		$(PIP_INSTALL) "torch==$(TORCH_VERSION)"; \
	fi
	touch $@

$(VENV)/.installed: $(VENV)/.installed-torch pyproject.toml
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed-torch pyproject.toml
	$(PIP_INSTALL) -e '.[test]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: $(VENV)/.installed-torch pyproject.toml
	$(PIP_INSTALL) -e '.[docs]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-torch pyproject.toml
	$(PIP_INSTALL) -e '.[test,dev]'
	touch $@ $(VENV)/.installed $(VENV)/.installed-test
