"""A real server and real hospitals reject foreign or expired certificates, edited kits, and forbidden jobs."""

import datetime
import json
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.fuel.flare_api.api_spec import AuthorizationError
from nvflare.fuel.flare_api.flare_api import new_secure_session
from nvflare.fuel.hci.client import file_transfer

from medsilo import cli
from medsilo.flare.job_source import CONFIG, PLAN
from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.secure.consortium import MEMBER, SERVER, Consortium, wait_until, write_consortium
from tests.secure.test_strict_hospital import change

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("consortium")]


# -------------------------------------------------------------------------------------------- connections
def knock(consortium: Consortium, certificate: Path, patience: float = 60.0) -> str:
    context = ssl.create_default_context(cafile=consortium.kit(SITES[0]) / "startup/rootCA.pem")
    context.check_hostname = False
    context.load_cert_chain(certificate)
    with socket.create_connection(("127.0.0.1", consortium.port)) as plain:
        try:
            with context.wrap_socket(plain) as door:
                door.settimeout(patience)
                door.recv(1)
        except TimeoutError:
            return ""
        except ssl.SSLError as error:
            return str(error.reason)
    return "closed"


def with_key(certificate: bytes, key: bytes, path: Path) -> Path:
    path.write_bytes(certificate + key)
    return path


def expired(kit: Path, root: Path) -> bytes:
    old = x509.load_pem_x509_certificate((kit / "startup/client.crt").read_bytes())
    today = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
    builder = builder.not_valid_before(today - datetime.timedelta(9)).not_valid_after(today - datetime.timedelta(1))
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    key: Any = load_pem_private_key(json.loads(root.read_text())["root_pri_key"].encode(), None)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_a_certificate_of_another_root_or_an_expired_one_is_not_let_in(consortium: Consortium, tmp_path: Path) -> None:
    """NVFlare's server does not log a rejected connection, but TLS reports the rejection to the client."""
    write_consortium(tmp_path / "consortium.yaml", {SITES[0]: "teaching-hospital"}, consortium.port)
    provision = ["kits", "make", str(tmp_path / "consortium.yaml"), "-o", str(tmp_path / "kits")]
    assert cli.main(provision) == 0
    mine, theirs = consortium.kit(SITES[0]), tmp_path / "kits" / SITES[0]
    key = (mine / "startup/client.key").read_bytes()
    right = with_key((mine / "startup/client.crt").read_bytes(), key, tmp_path / "right.pem")
    assert knock(consortium, right, 2.0) == ""
    foreign = [(theirs / "startup" / name).read_bytes() for name in ("client.crt", "client.key")]
    assert knock(consortium, with_key(*foreign, tmp_path / "foreign.pem")) == "TLSV1_ALERT_UNKNOWN_CA"
    old = expired(mine, consortium.root / "kits/private-root/consortium/state/cert.json")
    assert knock(consortium, with_key(old, key, tmp_path / "old.pem")) == "SSLV3_ALERT_CERTIFICATE_EXPIRED"


def test_a_wrong_name_or_an_edited_kit_is_not_let_in(consortium: Consortium) -> None:
    """One party uses another hospital's name; a second party has changed the server's address in its kit."""
    for name in ("wrong-name", "edited"):
        shutil.copytree(consortium.kit(SITES[0]) / "startup", consortium.root / name / "startup")
        shutil.copytree(consortium.kit(SITES[0]) / "local", consortium.root / name / "local")
    edited = consortium.root / "edited"
    change(edited / "startup/fed_client.json", lambda values: values["servers"][0]["service"].update(target="x.org:1"))
    before = len(consortium.log(SERVER))
    other = consortium.start_party("hospital-x", consortium.root / "wrong-name")
    try:
        assert consortium.start_party(SITES[0], edited).wait(60) == 1
        assert consortium.log("edited").splitlines() == [
            "The following files are not secure content.",
            "fed_client.json",
        ]
        said = consortium.wait_for_log(SERVER, "'hospital-x'", before)
        assert f"authenticated as '{SITES[0]}' but claimed endpoint 'hospital-x'" in said
    finally:
        consortium.end(other)
    session = consortium.session()
    try:
        assert sorted(client.name for client in session.get_system_info().client_info) == SITES
    finally:
        session.close()


# ---------------------------------------------------------------------------------------------------- jobs
def audit(consortium: Consortium, party: str, job_id: str = "") -> str:
    return (consortium.kit(party) / job_id / "audit.log").read_text()


def server_audit(consortium: Consortium, job_id: str, folder: Path) -> str:
    session = consortium.session()
    try:
        return (Path(session.download_job_result(job_id, str(folder))) / "workspace/audit.log").read_text()
    finally:
        session.close()


def test_what_is_not_run(consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, _, other = SITES

    def job(name: str, *sites: str) -> Path:
        write_job(tmp_path / name, make_plan("fedavg", "training.rounds=1", sites=[*sites]), study=name)
        change(tmp_path / name / "meta.json", lambda meta: meta.update(deploy_map={"app": ["server", *sites]}))
        return tmp_path / name

    def other_plan(folder: Path, how: Callable[[dict[str, Any]], None]) -> None:
        shutil.copytree(folder.parent / "app", folder)
        plan = folder / "config" / PLAN.name
        values = yaml.safe_load(plan.read_text())
        how(values)
        plan.write_text(yaml.safe_dump(values))

    plans = job("plans", site, other)
    other_plan(plans / "rounds", lambda values: values["training"].update(rounds=99))
    other_plan(plans / "path", lambda values: values.update(data="/srv/another-hospital"))
    each = {"app": ["server"], "rounds": [site], "path": [other]}
    change(plans / "meta.json", lambda meta: meta.update(deploy_map=each))
    argument = job("argument", site)
    change(
        argument / CONFIG / "config_fed_client.json",
        lambda config: config["executors"][0]["executor"]["args"].update(data="/srv/another-hospital"),
    )
    sign = file_transfer.sign_folders

    def sign_and_change(folder: str, *arguments: Any) -> None:
        sign(folder, *arguments)
        plan = Path(folder) / PLAN
        plan.write_text(plan.read_text().replace("rounds: 1", "rounds: 2"))

    session = consortium.session()
    try:
        ids = {path.name: session.submit_job(str(path)) for path in (plans, argument)}
        with monkeypatch.context() as patch:
            patch.setattr(file_transfer, "sign_folders", sign_and_change)
            ids["signed"] = session.submit_job(str(job("signed", site)))

        def over() -> bool:
            return all(str(session.get_job_status(job_id)).startswith("FINISHED") for job_id in ids.values())

        wait_until(over, 600, "three jobs to fail")
        metas = {name: session.get_job_meta(job_id) for name, job_id in ids.items()}
    finally:
        session.close()
    assert {name: meta["status"] for name, meta in metas.items()} == {
        "plans": "FINISHED:EXECUTION_EXCEPTION",
        "argument": "FINISHED:ABNORMAL",
        "signed": "FINISHED:FAILED_TO_RUN",
    }
    hash_differs = "medsilo refused: the job's plan at this site differs from the server's"
    assert hash_differs in audit(consortium, site, ids["plans"])
    assert "medsilo refused: data: unknown key with value '/srv/another" in audit(consortium, other, ids["plans"])
    refused = f"medsilo refused the answer of {site}: the job's plan at this site differs"
    assert refused in server_audit(consortium, ids["plans"], tmp_path)
    assert "got an unexpected keyword argument 'data'" in consortium.log(site)
    assert metas["signed"]["job_deploy_detail"] == ["server: app app does not pass signature verification"]
    assert ids["signed"] not in audit(consortium, site)
    assert "submit_job signed" in audit(consortium, SERVER)


def test_who_may_not_submit(consortium: Consortium, tmp_path: Path) -> None:
    write_job(tmp_path / "job", make_plan("fedavg"))
    session = new_secure_session(MEMBER, str(consortium.kit(MEMBER)), timeout=60.0)
    try:
        with pytest.raises(AuthorizationError):
            session.submit_job(str(tmp_path / "job"))
    finally:
        session.close()
    written = audit(consortium, SERVER)  # NVFlare writes an audit entry for the permission check, before the action
    assert f"[A:_cert_login {MEMBER}]" in written
    assert not any(MEMBER in line and "submit_job" in line for line in written.splitlines())
