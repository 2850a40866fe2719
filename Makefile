# `make demo` and `make test` set everything up by themselves: Python 3.11 or newer and make will do.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo-output
# The package as it is installed, for the type checker: editable installs map its folders in memory.
TREE := $(VENV)/typed/whiflash_agents

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py $(DEMO)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --durations 8 tests

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TREE) && mkdir -p $(TREE)
	ln -s $(CURDIR)/whiflash_agents/* $(CURDIR)/engine $(CURDIR)/workers $(CURDIR)/integrations $(TREE)
	cd $(TREE)/.. && ../bin/mypy --config-file $(CURDIR)/pyproject.toml

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
