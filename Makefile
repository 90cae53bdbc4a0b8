# Everything runs in .venv, which the first command makes. PYTHON=... chooses the Python it is made with.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Tests run in three processes, one thread each, slow ones in four: much of a federation's time is waiting.
# tests/conftest.py orders them.
PARALLEL := -n 3 --dist loadgroup --no-loadscope-reorder
quick test test-of test-changed test-guards test-slow test-long soak: export OMP_NUM_THREADS = 1
# They start hundreds of processes, which share what one of them compiled.
quick test test-of test-changed test-guards test-slow test-long soak: export PYTHONDONTWRITEBYTECODE =
# They write tens of thousands of small files: into memory, where Linux lends enough, which takes less time than a disk.
MEMORY := $(shell awk '$$2 == "/dev/shm" && $$4 !~ /noexec/ {print $$2}' /proc/mounts 2>/dev/null | \
	xargs -r df --output=avail,target 2>/dev/null | awk '$$1 + 0 > 4000000 {print $$2}')
quick test test-of test-changed: export TMPDIR := $(or $(firstword $(MEMORY)),$(TMPDIR),/tmp)

.PHONY: demo lint quick test test-of test-changed test-guards test-slow claims docs docs-tables clean \
	test-long supported trains last-long soak upgrade bench bench-history screenshots words \
	wheel wheelhouse tag release verify-release lock sbom image image-docker image-buildah audit

demo: $(VENV)/.demo-ready
	$(BIN)/medsilo demo

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Engine, methods, mixing, federations in process and one over the simulator, in less than a minute: while you write.
QUICK = houserules plan algorithms mixers mixing_weights coordinator digests
quick: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -m "not slow and not long" $(PARALLEL) -n 2 $(foreach name,$(QUICK),$(wildcard tests/unit/*/test_$(name).py)) tests/federation/test_simulator.py

# Types are checked while tests run, and told of afterwards.
test: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	mkdir -p build/tests
	$(BIN)/mypy >build/tests/types.txt & types=$$!; \
	$(BIN)/python -m pytest -m "not slow and not long" $(PARALLEL) --durations=10 --junitxml=build/tests/test.xml; \
	tests=$$?; wait $$types; typed=$$?; cat build/tests/types.txt; exit $$((tests | typed))

# What one plug-in or one subject has of its own: make test-of WHAT=dicom. These have tests under other names, too.
OF_dicom = dicom receive
OF_published = published layouts flamby nuclei activity_windows heart_dp paper_plans
OF_analyses = analyses privacy_audit
OF = $(wildcard $(foreach name,$(or $(OF_$(WHAT)),$(WHAT)),tests/*/test_$(name).py tests/*/test_$(name)_*.py tests/unit/*/test_$(name).py tests/unit/*/test_$(name)_*.py))
test-of: $(VENV)/.test-ready
	$(if $(and $(WHAT),$(OF)),,$(error no tests of "$(WHAT)"; say make test-of WHAT=dicom, for tests/unit/*/test_dicom*.py))
	$(BIN)/python -m pytest -m "not long" $(PARALLEL) $(OF)

test-slow: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m "slow and not long" $(PARALLEL) -n 4 --durations=10 --junitxml=build/tests/test-slow.xml

# The slow tests that promises and the mission rest on. The gate runs these; the others run at night.
test-guards: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m "slow and not long" $(PARALLEL) -n 4 --durations=10 \
		--junitxml=build/tests/test-guards.xml $$($(BIN)/python -m tests.claims --guards)

# Each promise and each outcome of a record names tests: all of them ran above, and passed, in this very build.
claims: $(VENV)/.test-ready
	$(BIN)/python -m tests.claims --gate build/tests/test.xml $(wildcard build/tests/test-guards.xml build/tests/test-slow.xml)

# The documentation as a site, in site/: open site/index.html.
docs: $(VENV)/.docs-ready
	$(BIN)/python -m tools.site

# The tables that pages keep in the repository, from the package.
docs-tables: $(VENV)/.demo-ready
	$(BIN)/python -m tools.tables

# What was installed, on all cores, but for the packages' own tests; some hold files for other Pythons.
compiled = $(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib || true

# The set that is tested, down to what others need. By version and not by hash, so that torch may be built for the CPU.
$(VENV)/.demo-ready: requirements.txt requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "medsilo needs Python 3.11 or newer: install it, or say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch, NVFlare and MONAI: 1.8 GB, which takes minutes"
	sed -e '/--hash/d' -e '/^#/d' -e 's/ \\$$//' requirements.lock >$(VENV)/versions.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt -c $(VENV)/versions.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(compiled)
	touch $@

$(VENV)/.docs-ready: $(VENV)/.demo-ready
	$(PYTHON) tools/dependencies.py docs >$(VENV)/docs.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/docs.txt
	touch $@

$(VENV)/.test-ready: $(VENV)/.demo-ready
	$(PYTHON) tools/dependencies.py dev >$(VENV)/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r $(VENV)/dev.txt
	$(compiled)
	touch $@

clean:
	rm -rf $(VENV) dist build site

# What a maintainer runs, and what runs at night
include tests/rings.mk benchmarks/bench.mk tools/pages.mk provisioning/release.mk
