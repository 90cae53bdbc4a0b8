# What a maintainer makes: wheels, releases, locks, images, and what is known of their software. The Makefile includes
# this file.

# The same commit gives the same bytes, whoever builds it and when: only what is committed goes in, with the same rights.
committed = rm -rf $(1) && mkdir -p $(1) dist && umask 022 && \
	git archive HEAD | tar --extract --no-same-permissions --directory $(1)
wheel sbom image image-docker image-buildah: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
wheel: $(VENV)/.test-ready
	$(call committed,build/wheel)
	umask 022; $(BIN)/python provisioning/wheels.py build/wheel dist

# Sign the tag of this version. When a person pushes the tag, CI builds, attests and keeps the files of the release:
# make tag KEY=~/.ssh/id_ed25519
tag:
	$(PYTHON) provisioning/release.py tag . $(or $(KEY),$(error say KEY=, the private key that signs))

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
	mkdir -p build/lock
	$(PYTHON) tools/dependencies.py
	$(PYTHON) tools/dependencies.py lock >build/lock/uv.txt
	$(PYTHON) tools/dependencies.py kubernetes >build/lock/kubernetes.txt
	test -x build/lock/bin/uv || { $(PYTHON) -m venv build/lock && \
		build/lock/bin/python -m pip install --quiet --disable-pip-version-check -r build/lock/uv.txt "pip>=25"; }
	$(LOCKED) requirements.txt --output-file requirements.lock
	$(LOCKED) build/lock/kubernetes.txt --constraints requirements.lock \
		--output-file provisioning/containers/kubernetes.lock
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
	mkdir -p build/audit && $(PYTHON) tools/dependencies.py audit >build/audit/pip-audit.txt
	test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && \
		build/audit/bin/python -m pip install --quiet --disable-pip-version-check -r build/audit/pip-audit.txt; }
	build/audit/bin/pip-audit --requirement requirements.txt
