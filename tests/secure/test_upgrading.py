"""If a consortium upgrades medsilo during a study, messages name the outdated hospitals, and the study's numbers do not
change.
"""

import shutil
from pathlib import Path

import pytest

from medsilo import cli
from medsilo.core.package import PLACE
from medsilo_lab.consortium import lead
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until
from tests.secure.test_mutual_tls import gathered
from tests.secure.test_resume import TWO, ended

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("pair")]


def test_a_consortium_is_upgraded_between_rounds(
    pair: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The test follows docs/start/install.md, except that one hospital is upgraded before all remaining parties."""
    plan = make_plan("fedbn", "training.rounds=40", sites=TWO)
    inprocess.run(plan, folder=tmp_path / "loop")
    shutil.copytree(PLACE, tmp_path / "new", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    with (tmp_path / "new/medsilo/mixing/rules.py").open("a") as file:
        file.write("# the next version\n")
    newer = {"PYTHONPATH": tmp_path / "new"}
    write_job(tmp_path / "job", plan, study="upgraded")
    kit, record = pair.kit(LEAD), Record(pair.kit(SERVER) / "medsilo" / "upgraded")
    first = lead.submit(tmp_path / "job", kit, print)
    wait_until(lambda: len(record.rounds()) >= 3, 120, "round 3")
    lead.cancel(first, kit, print)
    done = record.load_checkpoint()[1]["round"]
    assert 3 <= done < 40
    try:
        pair.restart(TWO[0], **newer)
        capsys.readouterr()
        assert cli.main(["resume", first, "--kit", str(kit)]) == 1
        assert f"{TWO[0]}" in (said := capsys.readouterr().err) and "install the same" in said
        assert record.load_checkpoint()[1]["round"] == done, "nothing was lost"

        pair.kill(SERVER)
        pair.start_party(SERVER, **newer)
        pair.restart(TWO[1], **newer)
        pair.await_hospitals()
        capsys.readouterr()
        assert cli.main(["resume", first, "--kit", str(kit)]) == 0
        assert ended(kit, capsys.readouterr().out.strip()) == "FINISHED:COMPLETED"
    finally:
        pair.kill(SERVER)
        pair.start_party(SERVER)
        for hospital in TWO:
            pair.restart(hospital)
        pair.await_hospitals()
    assert [line.round for line in record.rounds()] == list(range(1, 41))
    assert_same_outcome(tmp_path / "loop", gathered(pair, "upgraded", TWO, tmp_path / "secure"))
