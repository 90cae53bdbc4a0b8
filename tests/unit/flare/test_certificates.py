"""The server warns once before a certificate expires and once after the certificate has expired, even after restarts.

A hospital cannot report the dates of another hospital's certificate.
"""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from medsilo.flare.certificates import KEPT, CertificateEnds
from medsilo.flare.kit_events import reason_of_failure
from tests.unit.medsilo_secagg.test_sealed_identity import certificate, fresh, pem, root

DAY = 86_400.0


def ends_in(days: float, name: str, signs: Any = None) -> str:
    now = datetime.now(UTC)
    dates = now - timedelta(400), now + timedelta(days)
    above, own = root()
    return pem(certificate(name, fresh(), "root", signs or own, dates=dates), above).decode()


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    now = datetime.now(UTC)
    key = fresh()
    lasting = certificate("root", key, "root", key, ca=True, dates=(now - timedelta(500), now + timedelta(900)))
    monkeypatch.setattr("tests.unit.flare.test_certificates.root", lambda: (lasting, key))
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup/rootCA.pem").write_bytes(pem(lasting))
    (tmp_path / "startup/server.crt").write_text(ends_in(300, "server"))
    return tmp_path


def told(ends: CertificateEnds, now: float) -> list[tuple[str, str]]:
    events = list(ends.look(now))
    assert all(event.what == "certificate" for event in events)
    assert all(event.needs_somebody != ("renewed" in event.text) for event in events)
    return [(event.who, event.text) for event in events]


def test_an_end_is_told_30_and_7_and_1_days_before_and_when_it_has_come(kit: Path) -> None:
    now = time.time()
    ends = CertificateEnds(kit)
    ends.heard("north", ends_in(100, "north"))
    said = list[tuple[str, str]]()
    for day in range(0, 110):
        said += told(ends, now + day * DAY)
        ends = CertificateEnds(kit)
        assert ends.ended(["north", "south"], now + day * DAY) == (["north"] if day >= 100 else [])
    assert [who for who, _ in said] == ["north"] * 4
    for (_, text), words in zip(said, ("30 days", "7 days", "a day", "ended on"), strict=True):
        assert words in text and "renew" in text
    ends.heard("north", ends_in(465, "north"))
    assert ends.ended(["north"], now + 110 * DAY) == []
    assert [(who, text[:14]) for who, text in told(ends, now + 110 * DAY)] == [("north", "it was renewed")]
    assert told(ends, now + 110 * DAY) == []
    assert [who for who, _ in told(ends, now + 290 * DAY)] == [""]
    (kit / KEPT).write_text("{damaged")
    assert CertificateEnds(kit).ended(["north"], now) == []


@pytest.mark.parametrize("wrong", ["another's", "another root's", "no text", "no certificate", "too long", "earlier"])
def test_a_hospital_says_nothing_of_others_and_nothing_that_the_root_did_not_sign(kit: Path, wrong: str) -> None:
    ends = CertificateEnds(kit)
    ends.heard("north", ends_in(100, "north"))
    said: Any = {
        "another's": ends_in(-1, "south"),
        "another root's": ends_in(-1, "north", fresh()),
        "no text": 7,
        "no certificate": "-----BEGIN CERTIFICATE-----",
        "too long": ends_in(-1, "north") + "x" * 1_000_000,
        "earlier": ends_in(-1, "north"),
    }[wrong]
    ends.heard("north", said)
    assert ends.ended(["north", "south"], time.time()) == [] and told(ends, time.time()) == []


def test_a_hospital_says_why_a_jobs_process_could_not_run(kit: Path) -> None:
    job = kit / "job"
    job.mkdir()
    log = job / "error_log.txt"
    assert reason_of_failure(kit, "job") == ""
    log.write_text("FileNotFoundError: /data/jane-doe.nii\n")
    assert reason_of_failure(kit, "job") == ""
    log.write_text("UnsafeComponentError: Component 'a.b.C' at config path 'executors.#1' is not in allow_list\n")
    assert reason_of_failure(kit, "job").startswith("its policies refuse the job: a.b.C is not in its class_allow_list")
    (kit / "startup/server.crt").write_text(ends_in(-1, "server"))
    assert reason_of_failure(kit, "job").startswith("its certificate ended on")
