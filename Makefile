# Two commands do everything on a machine with Python 3.11, pip and make:
#   make train    install into .venv, train the reference model on two processes, show the result
#   make test     install into .venv, run the tests of everyday work: minutes
#   make test-all install into .venv, run every test: those of make test, the thorough ones and whole sweeps
#   make check    install into .venv, run ruff, pyright and import-linter
#   make docs     install into .venv, build the manual as a site into build/manual
#   make package  install into .venv, build sdist and wheel into build/package/dist, try the wheel outside of the repository
PYTHON ?= python3
VENV   ?= .venv
STEPS  ?= 600
RANKS  ?= 2
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet

.PHONY: train test test-all test-fast check docs package clean help
help:
	@sed -n 's/^#   //p' Makefile

$(VENV)/.run: pyproject.toml constraints.txt hatch_build.py $(wildcard src/paceline/_core/native*.[ch])
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Paceline needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11 ...")'
	$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing Paceline into $(VENV) (the first time this fetches PyTorch: a few minutes) ..."
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --constraint constraints.txt --editable '.[report]'
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) install --constraint constraints.txt --editable '.[report,mpi,ray,integrations,loggers,notebook,docs,dev]'
	$(PIP) install --constraint constraints.txt --no-deps mosaicml-streaming # it pins older numpy and transformers
	touch $@

train: $(VENV)/.run
	$(VENV)/bin/paceline train --nproc-per-node $(RANKS) --steps $(STEPS) --out runs/train --overwrite

# Two files at a time; then, one by one, the tests that measure links or times.
PYTEST := $(VENV)/bin/python -m pytest -q
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder -m "not alone"

ifeq ($(filter test-all,$(MAKECMDGOALS)),)
test: $(VENV)/.dev
	$(PYTEST) $(PARALLEL)
	$(PYTEST) -m alone tests/netlab
else
test: test-all # which has the tests of both
endif

test-all: $(VENV)/.dev
	$(PYTEST) --all $(PARALLEL)
	$(PYTEST) --all -m alone tests/netlab

test-fast: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -q tests/unit tests/cli

check: $(VENV)/.dev
	$(VENV)/bin/ruff check hatch_build.py src tests examples benchmarks docs/site docs/pictures
	$(VENV)/bin/ruff format --check hatch_build.py src tests examples benchmarks docs/site docs/pictures
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/lint-imports

docs: $(VENV)/.dev
	$(VENV)/bin/mkdocs build --strict

# The wheel is built from the sdist, and tried in an environment that has only its dependencies from $(VENV): a .pth
# file adds packages, but not the editable install of this repository, which is a .pth file itself.
PACKAGE := $(CURDIR)/build/package
TRIED   := cd $(PACKAGE)/elsewhere && env -u PYTHONPATH $(PACKAGE)/venv/bin
package: $(VENV)/.dev
	rm -rf $(PACKAGE)
	mkdir -p $(PACKAGE)/elsewhere
	$(VENV)/bin/python -m build --outdir $(PACKAGE)/dist .
	$(VENV)/bin/python -m twine check --strict $(PACKAGE)/dist/*
	$(VENV)/bin/python -m venv --without-pip $(PACKAGE)/venv
	$(PIP) --python $(PACKAGE)/venv/bin/python install --no-deps --no-index $(PACKAGE)/dist/*.whl
	$(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(PACKAGE)/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth
	$(TRIED)/python -c 'import paceline, sys; sys.exit(not paceline.__file__.startswith(sys.prefix) and paceline.__file__)'
	$(TRIED)/paceline --version
	$(TRIED)/paceline doctor
	$(TRIED)/paceline train --steps 3 --out run
	test -s $(PACKAGE)/elsewhere/run/report.html

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
