"""With NVFlare's own commands and the files of 'provision --requests', a hospital makes its own key."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509

from medsilo import cli
from medsilo.core.files import load_tensors
from medsilo_lab.consortium import lead
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import CONTROLLER, write_job
from tests.conftest import make_plan
from tests.secure.consortium import EXAMPLES, LEAD, SERVER, Consortium, wait_until, write_consortium

pytestmark = pytest.mark.long
NAME = "hospital-a"


def nvflare(folder: Path, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "nvflare.cli", *map(str, arguments), "--format", "json"]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["data"]


def own_keys(file: Path, kits: Path) -> None:
    requests, ca = kits.parent / "requests", kits.parent / "ca"
    assert cli.main(["kits", "make", str(file), "-o", str(requests), "--requests"]) == 0
    profile = requests / "project_profile.yaml"
    nvflare(kits.parent, "cert", "init", "--profile", profile, "-o", ca)
    kits.mkdir()
    for folder in sorted(path for path in requests.iterdir() if path.is_dir()):
        request = nvflare(folder, "cert", "request", "--participant", f"{folder.name}.yaml")["request_zip"]
        signed = nvflare(requests, "cert", "approve", request, "--ca-dir", ca, "--profile", profile)
        fingerprint = signed["rootca_fingerprint_sha256"]
        packed = nvflare(folder, "package", signed["signed_zip"], "--fingerprint", fingerprint, "-w", "kit")
        shutil.copytree(folder / "local", Path(packed["output_dir"]) / "local", dirs_exist_ok=True)
        Path(packed["output_dir"]).rename(kits / folder.name)


def test_a_federation_of_own_keys_runs_a_study(tmp_path: Path) -> None:
    plan = make_plan("fedavg", "training.rounds=1", sites=[NAME])
    inprocess.run(plan, folder=tmp_path / "loop")
    write_job(tmp_path / "job", plan, study="own-keys")
    consortium = Consortium(tmp_path, {NAME: "strict-hospital"}, own_keys)
    try:
        consortium.start()
        lead.submit(tmp_path / "job", consortium.kit(LEAD), print)
        summary = consortium.kit(SERVER) / "medsilo/own-keys/summary.json"
        wait_until(summary.exists, 300, "the study's end")
    finally:
        consortium.stop()
    mine, theirs = (
        load_tensors(folder / "global/best.safetensors")[0] for folder in (summary.parent, tmp_path / "loop")
    )
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_hospital_keeps_its_key(tmp_path: Path) -> None:
    write_consortium(tmp_path / "consortium.yaml", {NAME: "strict-hospital"}, 8002)
    lead, hospital = tmp_path / "lead", tmp_path / "hospital"
    assert cli.main(["kits", "make", str(tmp_path / "consortium.yaml"), "-o", str(lead), "--requests"]) == 0
    assert not any(b"PRIVATE KEY" in path.read_bytes() for path in lead.rglob("*") if path.is_file())
    server = json.loads((lead / SERVER / "local/resources.json").read_text())
    assert CONTROLLER in server["class_allow_list"]

    (lead / NAME).rename(hospital)
    profile = lead / "project_profile.yaml"
    nvflare(lead, "cert", "init", "--profile", profile, "-o", lead / "ca")
    request = nvflare(hospital, "cert", "request", "--participant", f"{NAME}.yaml")["request_zip"]
    with zipfile.ZipFile(request) as sent:
        assert not any(b"PRIVATE KEY" in sent.read(name) for name in sent.namelist())
    signed = nvflare(lead, "cert", "approve", request, "--ca-dir", lead / "ca", "--profile", profile)
    fingerprint = signed["rootca_fingerprint_sha256"]
    kit = Path(
        nvflare(hospital, "package", signed["signed_zip"], "--fingerprint", fingerprint, "-w", "kit")["output_dir"]
    )

    root = x509.load_pem_x509_certificate((lead / "ca/rootCA.pem").read_bytes())
    x509.load_pem_x509_certificate((kit / "startup/client.crt").read_bytes()).verify_directly_issued_by(root)
    assert (kit / "startup/client.key").read_bytes() == (hospital / NAME / f"{NAME}.key").read_bytes()
    assert (
        json.loads((kit / "startup/fed_client.json").read_text())["servers"][0]["service"]["target"] == f"{SERVER}:8002"
    )
    assert (hospital / "local/privacy.json").read_bytes() == (EXAMPLES / "strict-hospital/privacy.json").read_bytes()
