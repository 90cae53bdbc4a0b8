# Targets for the tests of changed files, and for long tests: at night, before a release, with another NVFlare. The
# Makefile includes this file.

# Run the engine's quick tests, then the tests of the files that differ from SINCE.
SINCE ?= main
test-changed: quick
	$(BIN)/python -m tests.changed $(SINCE) $(PARALLEL)

# Then compare the ratios of the benchmarks that take a minute or two with the last release's, while no test runs.
test-long: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m long $(PARALLEL) --durations=10 --junitxml=build/tests/test-long.xml; \
	tests=$$?; $(BIN)/python -m benchmarks.history --now; exit $$((tests | $$?))

# Install medsilo from its wheels into a new environment, and train: make supported WITH=3.13. In CI, each claim of
# docs/start/install.md is one job.
WITH ?= 3.11
supported: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m long tests/unit/project/test_wheel.py -k "own_environment and $(WITH)"

# Install medsilo without the packages of its tests into a new environment, and train in one process. In CI, each other
# system that docs/start/install.md names is one job.
trains:
	$(PYTHON) -m venv build/trains
	build/trains/bin/python -m pip install --quiet '.[lab]'
	build/trains/bin/medsilo run fedavg --engine inprocess --device cpu

# In CI, print when 'make test-long' last passed, at night or before a release. A dash marks a step whose failure stops
# no change.
last-long:
	-gh run list --workflow long.yml --branch main --status success --limit 1

# Disturb a federation over TLS for HOURS, with random events from SEED, and write to runs/soak.
HOURS ?= 2
SEED ?= 0
soak: $(VENV)/.test-ready
	$(BIN)/python -m tests.secure.soak --hours $(HOURS) --seed $(SEED) --folder runs/soak

# Run all tests with another NVFlare in a new environment: make upgrade NVFLARE=2.9.0 [QUICK=1]
OTHER = build/nvflare-$(NVFLARE)
upgrade: $(VENV)/.test-ready
	$(BIN)/python -m venv --without-pip --symlinks $(OTHER)
	$(BIN)/python -c "import sys; print(*(own for own in sys.path if own.endswith('-packages')), sep='\n')" \
		>"$$(echo $(OTHER)/lib/python*/site-packages)/below.pth"
	$(BIN)/python -m pip --python $(OTHER)/bin/python install --quiet nvflare==$(NVFLARE)
	$(BIN)/python -m pip --python $(OTHER)/bin/python install --quiet --no-deps --no-build-isolation --editable .
	PATH="$(CURDIR)/$(OTHER)/bin:$(CURDIR)/$(BIN):$$PATH" $(OTHER)/bin/python -m pytest $(PARALLEL) \
		-m "not long$(if $(QUICK), and not slow)"
