# Tests of what changed, and those that take long: at night, before a release, with another NVFlare. The Makefile
# includes this file.

# The engine's quick ring, then what docs/seats.yaml names for the files that differ from SINCE.
SINCE ?= main
test-changed: quick
	$(BIN)/python -m tests.changed $(SINCE) $(PARALLEL)

# Then, with nothing beside, the ratios of the benchmarks that take a minute or two, against those of the last release.
test-long: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m long $(PARALLEL) --durations=10 --junitxml=build/tests/test-long.xml; \
	tests=$$?; $(BIN)/python -m benchmarks.history --now; exit $$((tests | $$?))

# medsilo from its wheels in an environment of its own, which trains: make supported WITH=3.13. In CI, each claim of
# docs/start/install.md is one job.
WITH ?= 3.11
supported: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m long tests/unit/project/test_wheel.py -k "own_environment and $(WITH)"

# medsilo without the packages of its tests, in an environment of its own: it installs, and trains in one process. In CI,
# each other system that docs/start/install.md names is one job.
trains:
	$(PYTHON) -m venv build/trains
	build/trains/bin/python -m pip install --quiet '.[lab]'
	build/trains/bin/medsilo run fedavg --engine inprocess --device cpu

# In CI: when 'make test-long' last passed, at night or before a release. A dash: no change waits for it.
last-long:
	-gh run list --workflow long.yml --branch main --status success --limit 1

# A federation over TLS that is disturbed for HOURS; SEED draws what happens. It writes to runs/soak.
HOURS ?= 2
SEED ?= 0
soak: $(VENV)/.test-ready
	$(BIN)/python -m tests.secure.soak --hours $(HOURS) --seed $(SEED) --folder runs/soak

# All tests with another NVFlare, in an environment of its own: make upgrade NVFLARE=2.9.0 [QUICK=1]
OTHER = build/nvflare-$(NVFLARE)
upgrade: $(VENV)/.test-ready
	$(BIN)/python -m venv --without-pip --symlinks $(OTHER)
	$(BIN)/python -c "import sys; print(*(own for own in sys.path if own.endswith('-packages')), sep='\n')" \
		>"$$(echo $(OTHER)/lib/python*/site-packages)/below.pth"
	$(BIN)/python -m pip --python $(OTHER)/bin/python install --quiet nvflare==$(NVFLARE)
	$(BIN)/python -m pip --python $(OTHER)/bin/python install --quiet --no-deps --no-build-isolation --editable .
	PATH="$(CURDIR)/$(OTHER)/bin:$(CURDIR)/$(BIN):$$PATH" $(OTHER)/bin/python -m pytest $(PARALLEL) \
		-m "not long$(if $(QUICK), and not slow)"
