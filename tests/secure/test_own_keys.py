"""The way in which a hospital makes its own key: NVFlare's own commands on what 'provision --requests' wrote."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from medsilo import cli
from tests.secure.consortium import EXAMPLES, SERVER, write_consortium

pytestmark = pytest.mark.slow
NAME = "hospital-a"


def nvflare(folder: Path, *arguments: object) -> dict[str, Any]:
    """One of NVFlare's commands, in this folder; what it says."""
    command = [sys.executable, "-m", "nvflare.cli", *map(str, arguments), "--format", "json"]
    environment = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["data"]


def test_a_hospital_keeps_its_key(tmp_path: Path) -> None:
    write_consortium(tmp_path / "consortium.yaml", {NAME: "strict-hospital"}, 8002)
    lead, hospital = tmp_path / "lead", tmp_path / "hospital"
    assert cli.main(["provision", str(tmp_path / "consortium.yaml"), "-o", str(lead), "--requests"]) == 0
    assert not any(b"PRIVATE KEY" in path.read_bytes() for path in lead.rglob("*") if path.is_file())
    server = json.loads((lead / SERVER / "local/resources.json").read_text())
    assert "medsilo.flare." in server["class_allow_list"]

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
