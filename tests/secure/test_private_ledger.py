"""A privacy ledger has the same entries over mutual TLS as in one process, even if processes die.

The kit's key signs the ledger.
"""

from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
import yaml
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from medsilo import cli
from medsilo.core.files import write_text
from medsilo.plan import parse_plan
from medsilo.site.ledger import Ledger, LedgerStanding, ledgers
from medsilo.site.query_budget import QueryBudget
from medsilo.site.settings import make_settings
from medsilo.site.signing import UseKey, public_text
from medsilo_lab.consortium import lead
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import SITES
from tests.hospital import NAMES, write_photos
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until
from tests.secure.test_resume import ended
from tests.unit.privacy.test_private_numbers import NOISY

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pair")]
HOSPITAL = SITES[0]


def standing(book: Path, others: Iterable[str] = ()) -> LedgerStanding:
    [data] = {*ledgers(book)} - {*others}
    return Ledger(book, data).standing()


@pytest.mark.long
def test_a_hospital_that_dies_has_the_ledger_of_the_loop_and_at_most_one_answer_more(
    pair: Consortium, tmp_path: Path
) -> None:
    local = pair.kit(HOSPITAL) / "local/medsilo.yaml"
    before = local.read_text()
    photos = write_photos(tmp_path / "photos", NAMES)
    demands = {"epsilon": 5.0, "delta": 1e-3, "public": {"counts": "known"}}
    own = {"device": "cpu", "approval": "none", "data": str(photos), "privacy": demands}
    plan = parse_plan(NOISY, ["training.rounds=30", f"participation.sites=[{HOSPITAL}]"])
    key_of = QueryBudget(pair.kit(HOSPITAL) / "medsilo/_hospital" / HOSPITAL).key()
    # with the same key, both runs split the data alike
    write_text(tmp_path / "_hospital" / HOSPITAL / "key", key_of.hex())
    inprocess.run(plan, folder=tmp_path / "loop", settings=make_settings(own, "x"))
    kit, record = pair.kit(LEAD), Record(pair.kit(SERVER) / "medsilo/private")
    book = pair.kit(HOSPITAL) / "medsilo/_hospital" / HOSPITAL
    others = ledgers(book)
    local.write_text(yaml.safe_dump(own))

    def of_job() -> list[psutil.Process]:
        return pair.family(HOSPITAL, "client.worker_process")

    try:
        write_job(tmp_path / "job", plan, study="private")
        first = lead.submit(tmp_path / "job", kit, print)
        wait_until(lambda: len(record.rounds()) >= 3, 120, "three rounds")
        (process,) = of_job()
        process.kill()
        assert len(record.rounds()) < 30
        wait_until(lambda: any(own.pid != process.pid for own in of_job()), 120, "another process of the job")
        assert ended(kit, first) == "FINISHED:COMPLETED"
        assert [line.round for line in record.rounds()] == list(range(1, 31))
    finally:
        local.write_text(before)
        cli.main(["check", "--kit", str(pair.kit(HOSPITAL)), "--accept"])

    loop = standing(tmp_path / "_hospital" / HOSPITAL)
    secure = standing(book, others)
    entered = [[(e.what, e.charges) for e in s.entries if e.kind == "charged"] for s in (loop, secure)]
    again = [entry for entry in entered[1] if entry not in entered[0]]
    extra = len(entered[1]) - len(entered[0])
    assert again == [] and extra in (0, 1)  # the ledger may already have charged an answer that has not yet arrived
    assert [what for what, _ in dict(entered[0]).items()] == [what for what, _ in dict(entered[1]).items()]
    one, other = loop.epsilon(1e-3), secure.epsilon(1e-3)
    assert 1.95 < one <= 2.0 and one <= other <= one + 0.3
    assert other == one or extra > 0
    key = load_pem_private_key((pair.kit(HOSPITAL) / "startup/client.key").read_bytes(), None)
    assert set(secure.keys[1:]) == {public_text(UseKey.of(key, "ledger"))}
    assert {entry.spending.lead for entry in secure.entries if entry.spending} == {LEAD}
