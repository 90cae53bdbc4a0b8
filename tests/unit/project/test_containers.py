"""Test the containers without Docker and Kubernetes: check the containers' files, run the entry point, and prepare
kits.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.apis.workspace import Workspace
from nvflare.app_common.widgets.component_path_authorizer import ComponentPathAuthorizer
from nvflare.fuel.sec.security_content_service import LoadResult, SecurityContentManager

from medsilo import __version__, cli
from tests.secure.consortium import SERVER, write_consortium
from tools.dependencies import group_of

BIN = Path(sys.executable).parent
SITE = "hospital-a"
TESTED = "custom/medsilo/tested.txt"


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("containers")
    write_consortium(folder / "consortium.yaml", {SITE: "strict-hospital"}, 8002)
    arguments = ["kits", "make", str(folder / "consortium.yaml"), "-o", str(folder / "kits")]
    assert cli.main(arguments) == 0
    yield folder / "kits"


@pytest.fixture
def containers(root: Path) -> Path:
    return root / "provisioning" / "containers"


def run(*command: object, **environment: object) -> subprocess.CompletedProcess:
    changed = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **{k: str(v) for k, v in environment.items()}}
    return subprocess.run([str(word) for word in command], env=changed, capture_output=True, text=True, timeout=600)


def test_what_cannot_be_run_here_is_linted(containers: Path, root: Path) -> None:
    linted = run("hadolint", containers / "Dockerfile")
    assert linted.returncode == 0, linted.stdout
    rules = "{extends: default, rules: {line-length: {max: 120}, document-start: disable, comments: disable}}"
    files = [
        containers / "kubernetes.yaml",
        *root.glob("site_configs/*/medsilo.yaml"),
        root / "provisioning/consortium.yaml",
    ]
    linted = run("yamllint", "--strict", "-d", rules, *files)
    assert linted.returncode == 0, linted.stdout


def test_the_image_has_what_it_needs_and_no_more(containers: Path, root: Path) -> None:
    """The build context contains each file that the Dockerfile copies, and the image's program does not run as root."""
    lines = (containers / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    allowed = {line[1:] for line in (containers / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    assert set(copied) == allowed and all((root / name).exists() for name in copied)
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001:10001"]
    assert any(f"medsilo:{__version__}" in line for line in lines)
    pinned = [line for line in (root / TESTED).read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in pinned)


def locked(path: Path) -> dict[str, str]:
    text = path.read_text().replace("\\\n", " ")
    entries = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==\S+( ; [^#]+?)?(\s+--hash=sha256:[0-9a-f]{64})+\s*", line) for line in entries)
    return dict(line.split()[0].split("==") for line in entries)


def test_the_image_takes_every_package_by_its_hash(containers: Path, root: Path) -> None:
    """If this test fails after a version has changed, run 'make lock'."""
    lock, kubernetes = locked(root / "requirements.lock"), locked(containers / "kubernetes.lock")
    pins = [line.split("==") for line in (root / TESTED).read_text().splitlines() if "==" in line]
    assert {name.lower(): version for name, version in pins}.items() <= lock.items() and len(lock) > 2 * len(pins)
    assert {"nvflare", "torch", "setuptools", "grpcio"} <= lock.keys()
    (wanted,) = (line.split("==") for line in group_of("kubernetes"))
    assert kubernetes[wanted[0]] == wanted[1]
    assert all(lock[name] == kubernetes[name] for name in lock.keys() & kubernetes.keys())
    calls = re.findall(r"pip install [^;&]*", (containers / "Dockerfile").read_text().replace("\\\n", " "))
    assert len(calls) == 3
    assert all("--require-hashes -r " in call or "--no-deps --no-build-isolation ." in call for call in calls)


def test_an_image_has_its_own_base_where_nobody_names_another(root: Path) -> None:
    """In earlier versions, two targets of the Makefile shared a variable, so one target changed the base image."""
    command = ["make", "--dry-run", "--directory", str(root), "image-docker"]
    asked = [
        subprocess.run([*command, *more], capture_output=True, text=True) for more in ([], ["BASE=python@sha256:0"])
    ]
    assert ["--build-arg BASE=" in one.stdout for one in asked] == [False, True]


def test_the_entry_point_refuses_what_is_no_kit(containers: Path, kits: Path, tmp_path: Path) -> None:
    for argument, kit, words in (
        ("site", tmp_path, "is no kit of a site"),
        ("server", kits / SITE, "is no kit of a server"),
        ("site", kits / SERVER, "is no kit of a site"),
    ):
        done = run(containers / "entrypoint.sh", argument, KIT=kit)
        assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_entry_point_starts_a_kit_and_medsilo(containers: Path, kits: Path, tmp_path: Path) -> None:
    """The test replaces the kit's start script by a script that prints one line."""
    kit = tmp_path / "kit"
    shutil.copytree(kits / SITE, kit)
    script = kit / "startup/sub_start.sh"
    assert 'exec python3 -u -m nvflare.private.fed.app.client.client_train -m "$WORKSPACE"' in script.read_text()
    script.write_text('#!/bin/sh\necho "started $*"\n')
    done = run(containers / "entrypoint.sh", "site", KIT=kit)
    assert (done.returncode, done.stdout) == (0, "started --once\n")
    fake = tmp_path / "medsilo"
    fake.write_text('#!/bin/sh\necho "medsilo $*"\n')
    fake.chmod(0o755)
    done = run(containers / "entrypoint.sh", "list", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (0, "medsilo list\n")


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["k8s", pytest.param("docker", marks=pytest.mark.slow)])
def test_a_prepared_kit_keeps_the_sites_policies(runtime: str, containers: Path, kits: Path, tmp_path: Path) -> None:
    config = containers / "kubernetes.yaml"
    if runtime == "docker":
        config = tmp_path / "docker.yaml"
        config.write_text("{runtime: docker, parent: {docker_image: 'medsilo:0.1.0'}}")
    for party in (SITE, SERVER):
        home = {"HOME": tmp_path}
        done = run(sys.executable, containers / "prepare.py", kits / party, config, tmp_path / party, **home)
        assert done.returncode == 0, done.stderr
        own, new = (json.loads((folder / party / "local/resources.json").read_text()) for folder in (kits, tmp_path))
        for key in ("class_allow_list", "class_list_enforcement_mode", "allow_log_streaming"):
            assert new.get(key) == own.get(key)
        ours = {"forgotten_jobs", "bounded_streams", "returning_sites"} if party == SERVER else {"lost_connections"}
        assert {f"{runtime}_launcher", *ours} <= {component["id"] for component in new["components"]}
        _, kept = SecurityContentManager(str(tmp_path / party / "startup")).load_json(
            "fed_server.json" if party == SERVER else "fed_client.json"
        )
        assert kept == LoadResult.OK
    assert "site_log_streamer" not in (tmp_path / SITE / "local/resources.json").read_text()
    for name in ("privacy.json", "authorization.json", "medsilo.yaml"):
        assert (tmp_path / SITE / "local" / name).read_bytes() == (kits / SITE / "local" / name).read_bytes()
    with pytest.raises(UnsafeComponentError):
        ComponentPathAuthorizer().authorize_component_config(
            {"path": "nvflare.app_common.np.np_trainer.NPTrainer"}, workspace=Workspace(str(tmp_path / SITE))
        )
    if runtime == "k8s":
        values = yaml.safe_load((tmp_path / SITE / "helm_chart/values.yaml").read_text())
        assert values["securityContext"]["runAsNonRoot"] is True and values["image"]["tag"] == __version__
        assert yaml.safe_load((tmp_path / SITE / "helm_chart/Chart.yaml").read_text())["name"]
