# Everything runs in .venv, which the first command makes. PYTHON=... chooses the Python it is made with.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Tests run in three processes, one thread each, slow ones in four: much of a federation's time is waiting.
# tests/conftest.py orders them.
PARALLEL := -n 3 --dist loadgroup --no-loadscope-reorder
quick test test-of test-changed test-slow test-long soak: export OMP_NUM_THREADS = 1
# They start hundreds of processes, which share what one of them compiled.
quick test test-of test-changed test-slow test-long soak: export PYTHONDONTWRITEBYTECODE =
# They write tens of thousands of small files: into memory, where Linux lends enough, which takes less time than a disk.
MEMORY := $(shell awk '$$2 == "/dev/shm" && $$4 !~ /noexec/ {print $$2}' /proc/mounts 2>/dev/null | \
	xargs -r df --output=avail,target 2>/dev/null | awk '$$1 + 0 > 4000000 {print $$2}')
quick test test-of test-changed: export TMPDIR := $(or $(firstword $(MEMORY)),$(TMPDIR),/tmp)

.PHONY: demo jobs lint quick test test-of test-changed test-slow claims test-long last-long soak bench bench-history sizes upgrade wheel wheelhouse release verify-release lock sbom image image-docker image-buildah audit docs screenshots docs-tables words clean

demo: $(VENV)/.demo-ready
	$(BIN)/medsilo demo

# Writes the folders in jobs/ from the plans in custom/medsilo/jobs/.
jobs: $(VENV)/.demo-ready
	$(BIN)/python jobs/write.py

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Engine, methods, mixing, federations in process and one over the simulator, in less than a minute: while you write.
QUICK = houserules plan algorithms mixers mixing_weights coordinator digests
quick: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -m "not slow and not long" $(PARALLEL) -n 2 $(QUICK:%=tests/unit/test_%.py) tests/federation/test_simulator.py

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
OF = $(wildcard tests/plugins/$(WHAT) $(foreach name,$(or $(OF_$(WHAT)),$(WHAT)),tests/*/test_$(name).py tests/*/test_$(name)_*.py))
test-of: $(VENV)/.test-ready
	$(if $(and $(WHAT),$(OF)),,$(error no tests of "$(WHAT)"; say make test-of WHAT=dicom, for tests/*/test_dicom*.py))
	$(BIN)/python -m pytest -m "not long" $(PARALLEL) $(OF)

# The engine's quick ring, then what docs/seats.yaml names for the files that differ from BASE.
BASE ?= main
test-changed: quick
	$(BIN)/python -m tests.changed $(BASE) $(PARALLEL)

test-slow: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m "slow and not long" $(PARALLEL) -n 4 --durations=10 --junitxml=build/tests/test-slow.xml

# Each promise and each outcome of a record names tests: all of them ran in the two above, and passed, in this very build.
claims: $(VENV)/.test-ready
	$(BIN)/python -m tests.claims --gate build/tests/test.xml build/tests/test-slow.xml

test-long: $(VENV)/.test-ready
	$(BIN)/python -m pytest -m long $(PARALLEL) --durations=10 --junitxml=build/tests/test-long.xml

# In CI: when the line above last passed, at night or before a release. A dash: no change waits for it.
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

# The same commit gives the same bytes, whoever builds it and when: only what is committed goes in, with the same rights.
committed = rm -rf $(1) && mkdir -p $(1) dist && umask 022 && \
	git archive HEAD | tar --extract --no-same-permissions --directory $(1)
wheel sbom image image-docker image-buildah: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
wheel: $(VENV)/.test-ready
	$(call committed,build/wheel)
	umask 022; $(BIN)/python provisioning/wheels.py build/wheel dist

# The wheels, the hashes of all that they need, and a signature over both by an SSH key: make release KEY=~/.ssh/id_ed25519
release: wheel
	$(BIN)/python provisioning/release.py write dist requirements.txt $(or $(KEY),$(error say KEY=, the private key that signs))

# The wheels and all that they need in dist/wheelhouse, with hashes, for machines without a network.
wheelhouse: wheel
	$(BIN)/python provisioning/release.py wheelhouse dist requirements.txt

# SIGNERS has lines "maintainer ssh-ed25519 ...", from elsewhere than the release: make verify-release SIGNERS=signers
verify-release:
	$(PYTHON) provisioning/release.py verify dist $(or $(SIGNERS),$(error say SIGNERS=, the file with the maintainer's key))

# Give BASE=python@sha256:... for the same base image as another builder, and BUILDER=buildah where no Docker daemon runs.
BUILDER ?= docker
IMAGE_ARGS = --file build/image/provisioning/containers/Dockerfile --no-cache --build-arg SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) \
	$(if $(BASE),--build-arg BASE=$(BASE))
image: image-$(BUILDER)

image-docker:
	$(call committed,build/image)
	docker buildx build $(IMAGE_ARGS) --provenance=false \
		--output type=oci,dest=dist/medsilo.oci.tar,rewrite-timestamp=true build/image

image-buildah:
	$(call committed,build/image)
	buildah build $(IMAGE_ARGS) --timestamp $(SOURCE_DATE_EPOCH) $(BUILDAH_ARGS) --iidfile dist/medsilo.image-id build/image
	rm -rf build/image.oci
	buildah push --quiet "$$(cat dist/medsilo.image-id)" oci:build/image.oci
	tar --create --file dist/medsilo.oci.tar --sort=name --mtime=@$(SOURCE_DATE_EPOCH) --owner=0 --group=0 \
		--numeric-owner --mode=u=rwX,go=rX --directory build/image.oci .
	sha256sum dist/medsilo.oci.tar

# Every package that the pinned ones need, for all systems, with the hashes of its files: the image is made of them.
# Versions in the locks stay as they are where they fit; UPGRADE=1 takes the newest.
LOCKED = build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)
lock: $(VENV)/.test-ready
	test -x build/lock/bin/uv || { $(PYTHON) -m venv build/lock && \
		build/lock/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-lock.txt "pip>=25"; }
	$(LOCKED) requirements.txt --output-file requirements.lock
	cd provisioning/containers && ../../$(LOCKED) kubernetes.txt --constraints ../../requirements.lock \
		--output-file kubernetes.lock
	sed -e '/--hash/d' -e '/^#/d' -e 's/ \\$$//' $(SOFTWARE) | sort -u >build/lock/versions.txt
	build/lock/bin/python -m pip install --dry-run --ignore-installed --no-deps --quiet --report build/lock/report.json \
		-r build/lock/versions.txt
	$(BIN)/python provisioning/sbom.py licences build/lock/report.json $(LICENCES)

# The software of the image with versions, hashes and licences, as CycloneDX has it: dist/sbom.cdx.json.
SOFTWARE = requirements.lock provisioning/containers/kubernetes.lock
LICENCES = provisioning/containers/licences.csv
sbom: $(VENV)/.test-ready
	mkdir -p dist
	$(BIN)/python provisioning/sbom.py write requirements.lock $(LICENCES) dist/sbom.cdx.json

# Known weaknesses of the pinned packages and all that they need, from a public service: needs a network.
audit:
	test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && \
		build/audit/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-audit.txt; }
	build/audit/bin/pip-audit --requirement requirements.txt

# A dash: what misses its bound does not stop the others.
bench: export MEDSILO_RATIOS = build/ratios.jsonl
bench: $(VENV)/.test-ready
	mkdir -p build && rm -f $(MEDSILO_RATIOS)
	-$(BIN)/python benchmarks/mixing.py
	-$(BIN)/python benchmarks/sealing.py
	-$(BIN)/python benchmarks/adafed.py
	-$(BIN)/python benchmarks/federation.py
	-$(BIN)/python benchmarks/harmofl.py
	-$(BIN)/python benchmarks/privacy.py
	-$(BIN)/python benchmarks/fedsm.py
	-$(BIN)/python benchmarks/data.py
	-$(BIN)/python benchmarks/augmentation.py
	-$(BIN)/python benchmarks/volumes.py
	-$(BIN)/python -m benchmarks.nnunet
	-$(BIN)/python -m benchmarks.networks

# The ratios of the last 'make bench' beside those of the last release; without one, those of the cheap benchmarks.
bench-history: $(VENV)/.test-ready
	$(BIN)/python -m benchmarks.history

# What somebody must read and trust, beside what it may be at most: one traced run in the simulator.
sizes: $(VENV)/.test-ready
	$(BIN)/python -m tests.sizes

# The documentation as a site, in site/: open site/index.html.
docs: $(VENV)/.docs-ready
	$(BIN)/python -m docs.site

# Pictures of the README and the pages, from synthetic hospitals, by a Chromium of this machine.
screenshots: $(VENV)/.demo-ready
	$(BIN)/python docs/screenshots.py

# The tables that pages keep in the repository, from the package.
docs-tables: $(VENV)/.demo-ready
	$(BIN)/python -m docs.tables

# 100 sentences of pages, help, messages and templates to read aloud, and those that are too long or say too little.
words: $(VENV)/.demo-ready
	$(BIN)/python -m docs.words --seed $(SEED)

# What was installed, on all cores, but for the packages' own tests; some hold files for other Pythons.
compiled = $(BIN)/python -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib || true

# The set that is tested, down to what others need. By version and not by hash, so that torch may be built for the CPU.
$(VENV)/.demo-ready: requirements.txt custom/medsilo/tested.txt requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "medsilo needs Python 3.11 or newer: install it, or say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing PyTorch, NVFlare and MONAI: 1.8 GB, which takes minutes"
	sed -e '/--hash/d' -e '/^#/d' -e 's/ \\$$//' requirements.lock >$(VENV)/versions.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt -c $(VENV)/versions.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(compiled)
	touch $@

$(VENV)/.docs-ready: $(VENV)/.demo-ready requirements-docs.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

$(VENV)/.test-ready: $(VENV)/.demo-ready requirements-dev.txt requirements-docs.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements-dev.txt
	$(compiled)
	touch $@

clean:
	rm -rf $(VENV) dist build site
