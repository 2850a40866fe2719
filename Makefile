# `make demo` and `make test` set everything up by themselves: Python 3.11 or newer and make will do.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo-output

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py $(DEMO)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --durations 8 tests

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(VENV) && bin/mypy --config-file $(CURDIR)/pyproject.toml  # sees the installed package

clean:
	rm -rf $(VENV) build *.egg-info

# Strict editable mode links every module into place, so type checkers follow the package mapping; a
# new module needs a new link, so the list of modules is a prerequisite.
MODULES := $(sort $(foreach d,whiflash_agents engine workers integrations,$(wildcard $(d)/*.py $(d)/*/*.py)))
$(VENV)/.modules: FORCE
	@mkdir -p $(VENV)
	@echo '$(MODULES)' | cmp -s - $@ || echo '$(MODULES)' > $@
FORCE:

$(VENV)/.installed: pyproject.toml constraints.txt $(VENV)/.modules
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e '.[dev]' --config-settings editable_mode=strict
	@touch $@
