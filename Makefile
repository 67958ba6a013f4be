# Everything below builds its own environment first: a clean clone needs make, Python 3.11 to 3.13 and a package index.
#
#   make demo    the whole path on simulated cards: requests, a killed child, a table at the end
#   make test    the tests, once on the embedded Valkey and once on a redis-server of version 7
#   make check   format, lint, types, layers, and that docs/ says what the code says
#   make bench   the benchmarks
#   make fmt     format the code
#
# torch: the pin in constraints.txt is met by whatever build the configured index offers. To get the CPU build where
# the index offers a CUDA one first, set PIP_EXTRA_INDEX_URL (or --find-links) to PyTorch's CPU index before `make`;
# a local version (2.13.0+cpu) satisfies the pin too.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
TEST_SERVERS ?= valkey redis
# Test processes at once; most tests wait for processes of their own rather than compute.
TEST_WORKERS ?= 3
BENCH_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
CODE := $(wildcard gateway gpu_agent scheduler vramgate tests examples benchmarks docs)
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Native tracebacks: pytest's own parse the source, which on Python 3.11 can end a test process with a SystemError.
XDIST := -n $(TEST_WORKERS) --dist loadfile --tb=native
# The tests in which the kind of server can make a difference; the others run once.
ON_EVERY_SERVER := tests/ledger tests/system $(patsubst %,tests/gateway/test_%.py,events infer jobs service)

.DEFAULT_GOAL := help
.PHONY: help env demo test check bench fmt redis-server nginx curl $(TEST_SERVERS:%=test-%)

help:
	@sed -n '3,7s/^# *//p' Makefile

env: $(STAMP)

# silero-vad is wanted for the TorchScript file in its wheel; its dependencies (torchaudio, onnxruntime) are not.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "vramgate needs Python 3.11 to 3.13, and $(PYTHON) is %d.%d; say which one with make PYTHON=..." % v)'
	@echo "building $(VENV); torch is large, so this takes a minute or more"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt -e '.[gateway,agent,embedded,dev]'
	$(PIP) install -q -c constraints.txt --no-deps silero-vad
	@touch $@

demo: $(STAMP)
	$(BIN)/vramgate demo

test: $(TEST_SERVERS:%=test-%)

# One server after the other, also under make -j: both runs use the same cores.
ifneq ($(filter valkey,$(TEST_SERVERS)),)
test-redis: | test-valkey
endif

test-valkey: $(STAMP) nginx curl
	VRAMGATE_TEST_SERVER=valkey $(BIN)/python -m pytest $(XDIST) $(PYTEST_ARGS)

test-redis: $(STAMP) nginx redis-server
	VRAMGATE_TEST_SERVER=redis $(BIN)/python -m pytest $(XDIST) $(PYTEST_ARGS) $(ON_EVERY_SERVER)

# Programs of the system's own that the tests run; Debian keeps nginx in /usr/sbin.
redis-server nginx curl:
	@PATH="$$PATH:/usr/sbin" command -v $@ >/dev/null || deploy/apt-install $@

check: $(STAMP)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/docs/test_pages.py

bench: $(STAMP)
	@set -e; for file in $(wildcard benchmarks/[a-z]*.py); do echo "== $$file"; $(BIN)/python "$$file" $(BENCH_ARGS); done

fmt: $(STAMP)
	$(BIN)/ruff check --fix-only -q $(CODE)
	$(BIN)/ruff format $(CODE)
