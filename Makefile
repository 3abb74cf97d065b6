# The two commands of the README: `make demo` runs the main job, `make test` passes the tests. `make docs` builds the site.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test docs clean

demo: $(VENV)/.installed
	$(BIN)/torchcaps demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 3 --dist worksteal

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "open docs/_build/html/index.html"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[plot,sklearn,explore]"
	touch $@

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[docs]"
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	sh tests/web/browser.sh > $(VENV)/browser.log 2>&1 & $(PIP) -e ".[dev]" && wait
	touch $@ $(VENV)/.installed $(VENV)/.installed-docs

clean:
	rm -rf $(VENV) docs/_build docs/gallery .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
