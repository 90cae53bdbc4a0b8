# Everything runs in .venv, which the first command makes. PYTHON=... chooses the Python it is made with.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Tests run in three processes, one thread each: half of a federation's time is waiting.
PARALLEL := -n 3 --dist loadgroup
test test-slow test-long: export OMP_NUM_THREADS = 1
# They start hundreds of processes, which share what one of them compiled.
test test-slow test-long: export PYTHONDONTWRITEBYTECODE =

.PHONY: demo jobs test test-slow test-long bench docs screenshots docs-tables clean

demo: $(VENV)/.demo-ready
	$(BIN)/medsilo demo

# Writes the folders in jobs/ from jobs/source/.
jobs: $(VENV)/.demo-ready
	$(BIN)/python jobs/source/write.py

test: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not slow and not long" $(PARALLEL) --durations=10

test-slow: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m "slow and not long" $(PARALLEL) --durations=10

test-long: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m long $(PARALLEL) --durations=10

# A dash: what misses its bound does not stop the others.
bench: $(VENV)/.test-ready
	-$(BIN)/python benchmarks/mixing.py
	-$(BIN)/python benchmarks/sealing.py
	-$(BIN)/python benchmarks/adafed.py
	-$(BIN)/python benchmarks/federation.py
	-$(BIN)/python benchmarks/harmofl.py
	-$(BIN)/python benchmarks/privacy.py
	-$(BIN)/python benchmarks/fedsm.py
	-$(BIN)/python benchmarks/data.py
	-$(BIN)/python benchmarks/volumes.py

# The documentation as a site, in site/: open site/index.html.
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(VENV)/.docs-ready
	$(BIN)/python -m mkdocs build

# Pictures of the README and the pages, from synthetic hospitals, by a Chromium of this machine.
screenshots: $(VENV)/.demo-ready
	$(BIN)/python docs/screenshots.py

# Tables of docs/plan.md, docs/run-tree.md, docs/limits.md and docs/commands.md, from the package.
docs-tables: $(VENV)/.demo-ready
	$(BIN)/python -m docs.tables

$(VENV)/.demo-ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "medsilo needs Python 3.11 or newer: install it, or say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(VENV)/.docs-ready: $(VENV)/.demo-ready requirements-docs.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

$(VENV)/.test-ready: $(VENV)/.demo-ready requirements-dev.txt requirements-docs.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) dist build site
