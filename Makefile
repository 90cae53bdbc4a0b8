# Everything runs in .venv, which the first command makes. PYTHON chooses another Python 3.11.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow bench clean

demo: $(VENV)/.demo-ready
	$(BIN)/medsilo demo

test: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow" --durations=10

test-slow: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m slow --durations=10

bench: $(VENV)/.test-ready
	$(BIN)/python benchmarks/mixing.py
	$(BIN)/python benchmarks/adafed.py
	$(BIN)/python benchmarks/federation.py

$(VENV)/.demo-ready: requirements.txt pyproject.toml
	command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: install Python 3.11, or say make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(VENV)/.test-ready: $(VENV)/.demo-ready requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) dist build
