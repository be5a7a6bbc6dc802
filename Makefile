# Every target sets up what it needs: a first run makes .venv, later runs start at once.

PY := .venv/bin/python
SETUP := sh scripts/environment.sh

# Workers are processes, so each stays on one thread.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# The C library gives large blocks back to the system, and who pays for the next one is chance.
KEEP_MEMORY := MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_MMAP_THRESHOLD_=100000000000

# A broken .venv outdates its stamps, whatever their age.
REBUILD := $(if $(shell $(SETUP) healthy),,rebuild)
# The demo needs little, and takes the full environment where there is one.
DEMO_ENV := $(if $(wildcard .venv/.dev),.venv/.dev,.venv/.demo)

.NOTPARALLEL:
.PHONY: help demo test check spec bench docs clean rebuild

help:
	@echo "make demo    train a small model with several penalties, and see which one moved it"
	@echo "make test    run the whole test suite"
	@echo "make check   style, format, types, doctests and the tests of the house"
	@echo "make spec    prove, and check the code against, the exact definitions"
	@echo "make bench   measure speed, memory and accuracy"
	@echo "make docs    build the documentation into site/"
	@echo "make clean   remove .venv, caches and everything built"

.venv/.demo .venv/.dev: pyproject.toml constraints.txt $(REBUILD)
	@$(SETUP) install $(patsubst .%,%,$(notdir $@))
	@touch $@

demo: $(DEMO_ENV)
	@$(PY) examples/demo.py

test: .venv/.dev
	@$(ONE_THREAD) $(PY) -m pytest -n auto

check: .venv/.dev
	@echo "== style"
	@$(PY) -m ruff check .
	@echo "== format"
	@$(PY) -m ruff format --check .
	@echo "== types"
	@$(PY) -m mypy
	@echo "== doctests"
	@$(PY) -m pytest -q --doctest-modules src
	@echo "== house"
	@$(ONE_THREAD) $(PY) -m pytest -q -n auto tests/house

spec: .venv/.dev
	@echo "== claims"
	@$(PY) -m equipoise.spec
	@echo "== agreement"
	@$(ONE_THREAD) $(PY) -m pytest -q -n auto tests/spec

bench: .venv/.dev
	@$(KEEP_MEMORY) $(PY) -m benchmarks
	@$(KEEP_MEMORY) $(PY) -m benchmarks.compiled --guard

# The variable silences a banner about what follows MkDocs.
docs: .venv/.dev
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir site

clean:
	rm -rf .venv site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
