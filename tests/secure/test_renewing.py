"""While a study runs over mutual TLS, the lead renews every party's certificate, and the study needs no further
commands.
"""

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from medsilo import cli
from medsilo.core.errors import MedsiloError
from medsilo.runs import event_reading
from medsilo_lab.consortium import lead
from medsilo_lab.consortium.provision import _seal
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, SERVER, Consortium, provision, wait_until
from tests.secure.test_mutual_tls import gathered
from tests.secure.test_resume import ended

A, B = SITES[:2]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pair")]


def renew(pair: Consortium, name: str, *how: str) -> None:
    own = pair.kit(name) / "startup" / ("server.crt" if name == SERVER else "client.crt")
    before = x509.load_pem_x509_certificate(own.read_bytes())
    made = ["kits", "make", str(pair.root / "consortium.yaml"), "-o", str(pair.root / "kits"), "--renew", name]
    assert cli.main([*made, *how]) == 0
    after = x509.load_pem_x509_certificate(own.read_bytes())
    assert after.serial_number != before.serial_number
    assert (after.public_key() == before.public_key()) == (not how)


@pytest.mark.long
def test_a_study_goes_on_while_each_party_is_renewed(pair: Consortium, tmp_path: Path) -> None:
    """A hospital that demands approvals gets a new key in addition to its certificate, and the server restarts to use
    its own new key.
    """
    changes = ["training.rounds=60", "participation.when_missing=wait", "participation.resume=3"]
    plan = make_plan("fedbn", *changes, sites=[A, B])
    inprocess.run(plan, folder=tmp_path / "loop")
    write_job(tmp_path / "renewed", plan, study="renewed")
    record, local = Record(pair.kit(SERVER) / "medsilo/renewed"), pair.kit(B) / "local/medsilo.yaml"
    settings = local.read_text()

    def goes_on(more: int = 2) -> None:
        wanted = len(record.rounds()) + more
        wait_until(lambda: len(record.rounds()) >= wanted, 120, f"round {wanted}")

    local.write_text(settings + "approval: required\n")
    try:
        assert cli.main(["approve", plan.hash, "--kit", str(pair.kit(B)), "--yes"]) == 0
        lead.submit(tmp_path / "renewed", pair.kit(LEAD), print)
        goes_on(3)
        for name, *how in ((A,), (B,), (B, "--new-key"), (LEAD,)):
            renew(pair, name, *how)
            goes_on()
        assert len((record.folder / "jobs.txt").read_text().split()) == 1
        pair.restart(B)
        goes_on()
        renew(pair, SERVER)
        pair.kill(SERVER)
        pair.start_party(SERVER)
        pair.await_hospitals()
        wait_until(lambda: bool(record.finished()), 240, "the study's end")
        jobs = (record.folder / "jobs.txt").read_text().split()
        assert len(jobs) == 2 and ended(pair.kit(LEAD), jobs[-1]) == "FINISHED:COMPLETED"
    finally:
        local.write_text(settings)
        (pair.kit(B) / "accepted-settings.json").unlink(missing_ok=True)
    assert_same_outcome(tmp_path / "loop", gathered(pair, "renewed", [A, B], tmp_path / "secure"))


def lasts(seconds: float, site: str) -> Callable[[Path, Path], None]:
    def make(file: Path, kits: Path) -> None:
        provision(file, kits)
        let_end(kits / site, kits / "private-root/consortium/state/cert.json", seconds)

    return make


def let_end(kit: Path, state: Path, seconds: float) -> None:
    startup, now = kit / "startup", datetime.now(UTC)
    old = x509.load_pem_x509_certificate((startup / "client.crt").read_bytes())
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number)
    builder = builder.not_valid_before(now - timedelta(360)).not_valid_after(now + timedelta(seconds=seconds))
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    key: Any = load_pem_private_key(json.loads(state.read_text())["root_pri_key"].encode(), None)
    (startup / "client.crt").write_bytes(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
    _seal([startup], state)


@pytest.mark.long
def test_a_certificate_that_ends_makes_the_study_wait(tmp_path: Path) -> None:
    """A process that dies after its certificate has expired cannot return until somebody renews the kit. The study uses
    none of its automatic restarts.
    """
    began, lasting = time.time(), 100.0
    own = Consortium(tmp_path, dict.fromkeys((A, B), "teaching-hospital"), lasts(lasting, B))
    changes = ["training.rounds=400", "participation.when_missing=wait", "participation.resume=3"]
    plan = make_plan("fedbn", *changes, sites=[A, B])
    write_job(tmp_path / "ends", plan, study="ends")
    record = Record(own.kit(SERVER) / "medsilo/ends")

    def told(party: str) -> list[str]:
        lines = [line.split("\t") for line in event_reading.read(own.kit(party))]
        return [columns[6] for columns in lines if columns[2] == "certificate" and columns[3] in (B, "-")]

    for site in (A, B):
        (own.kit(site) / "local/medsilo.yaml").write_text("device: cpu\nmemory_limit: 0\n")
    try:
        own.start()
        job = lead.submit(tmp_path / "ends", own.kit(LEAD), print)
        wait_until(lambda: len(record.rounds()) >= 3, 60, "round 3")
        for party in (B, SERVER):
            wait_until(lambda party=party: any("less than a day" in text for text in told(party)), 40, "a warning")
        time.sleep(max(0.0, began + lasting + 15 - time.time()))
        for party in (B, SERVER):
            assert [("ended on" in text) for text in told(party)] == [False, True]
        (process,) = own.family(B, "client.worker_process")
        process.kill()

        def says_why() -> bool:
            return any("certificate ended" in one.line() for one in lead.status(own.kit(LEAD)).hospitals)

        wait_until(says_why, 90, "why", every=2.0)
        stood = len(record.rounds())
        time.sleep(20)
        assert len(record.rounds()) == stood and not record.finished()
        assert (record.folder / "jobs.txt").read_text().split() == [job]
        renew(own, B)
        own.restart(B)
        wait_until(lambda: len(record.rounds()) > stood + 2, 120, "more rounds")
        assert (record.folder / "jobs.txt").read_text().split() == [job]
        lead.cancel(job, own.kit(LEAD), print)
    finally:
        own.stop()


@pytest.mark.long
def test_a_class_that_a_hospital_does_not_allow_is_a_refusal_with_its_reason(pair: Consortium, tmp_path: Path) -> None:
    """NVFlare ends the job as ABNORMAL; in an earlier version, the study restarted until no automatic restart was
    left.
    """
    plan = make_plan("fedbn", "participation.resume=3", sites=[A, B])
    write_job(tmp_path / "job", plan, study="disallowed")
    path = pair.kit(B) / "local/resources.json"
    before = path.read_text()
    values = json.loads(before)
    values["class_allow_list"] = [name for name in values["class_allow_list"] if "medsilo" not in name]
    try:
        path.write_text(json.dumps(values))
        with pytest.raises(MedsiloError) as caught:
            lead.submit(tmp_path / "job", pair.kit(LEAD), print)
    finally:
        path.write_text(before)
    assert f"{B} refused: its policies refuse the job: medsilo." in str(caught.value)
    record = Record(pair.kit(SERVER) / "medsilo/disallowed")
    time.sleep(15)
    assert len((record.folder / "jobs.txt").read_text().split()) == 1
    events = [line.split("\t") for line in event_reading.read(pair.kit(B))]
    assert any(columns[2] == "refused" and "class_allow_list" in columns[6] for columns in events)
