"""Somebody steals a copy of a hospital's kit, and the study over mutual TLS continues without this hospital."""

import shutil
import time
from pathlib import Path

import pytest

from medsilo import cli
from medsilo.runs import event_reading
from medsilo_lab.consortium import lead
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from nvflare_reliability.revocation import LIST
from tests.conftest import SITES, make_plan
from tests.secure.consortium import LEAD, REGISTERED, SERVER, Consortium, wait_until
from tests.secure.test_moving import TEACHING

STAYS, ALSO, LOST = SITES
RELAY = "city"
pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("behind", [{}, {RELAY: [LOST]}], ids=["its own line", "behind a relay"])
def test_a_kit_that_somebody_copied_is_of_no_use_to_anybody(behind: dict[str, list[str]], tmp_path: Path) -> None:
    consortium = Consortium(tmp_path, dict.fromkeys(SITES, TEACHING), relays=behind)
    kits = tmp_path / "kits"
    for site in SITES:
        (consortium.kit(site) / "local/medsilo.yaml").write_text("device: cpu\nmemory_limit: 0\n")
    changes = ["training.rounds=4000", "participation.when_missing=continue", "participation.minimum=1"]
    write_job(tmp_path / "job", make_plan("fedbn", *changes, sites=SITES), study="drill")
    record = Record(consortium.kit(SERVER) / "medsilo/drill")

    def answered_by(*sites: str) -> bool:
        return bool(record.rounds()) and record.rounds()[-1].answered == list(sites)

    try:
        consortium.start()
        job = lead.submit(tmp_path / "job", consortium.kit(LEAD), print)
        wait_until(lambda: len(record.rounds()) >= 3 and answered_by(*SITES), 180, "a round of all three")

        stolen = tmp_path / "stolen" / LOST
        for part in ("startup", "local"):
            shutil.copytree(consortium.kit(LOST) / part, stolen / part)
        assert cli.main(["kits", "revoke", LOST, "--kits", str(kits)]) == 0
        for party in (SERVER, *behind):
            shutil.copy(kits / LIST, consortium.kit(party) / LIST)

        wait_until(lambda: answered_by(STAYS, ALSO), 120, "a round without it")
        wait_until(lambda: all((consortium.kit(own) / LIST).exists() for own in (STAYS, ALSO)), 60, "the list")
        for site in (STAYS, ALSO):
            events = [line.split("\t") for line in event_reading.read(consortium.kit(site), "")]
            assert [own[6] for own in events if own[2] == "certificate" and "revoked" in own[6]]

        consortium.kill(LOST)
        before, door = len(consortium.log(LOST)), next(iter(behind), SERVER)
        consortium.start_party(LOST, stolen)
        now = len(record.rounds())
        wait_until(lambda: "revoked" in consortium.log(door), 60, "a line in the log of who refuses it")
        time.sleep(15)  # gives the stolen kit time for several attempts
        wait_until(lambda: len(record.rounds()) > now + 5, 60, "five more rounds")
        assert answered_by(STAYS, ALSO) and REGISTERED not in consortium.log(LOST)[before:]
        consortium.kill(LOST)

        made = ["kits", "make", str(tmp_path / "consortium.yaml"), "-o", str(kits), "--renew", LOST, "--new-key"]
        assert cli.main(made) == 0
        consortium.start_party(LOST)
        wait_until(lambda: answered_by(*SITES), 180, "a round with the hospital's new kit")
        lead.cancel(job, consortium.kit(LEAD), print)
    finally:
        consortium.stop()
