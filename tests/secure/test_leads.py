"""In a consortium with two leads and a member, each study over mutual TLS belongs to the person who submitted the
study.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from nvflare.fuel.flare_api import api_spec

from medsilo import cli
from medsilo.core.errors import MedsiloError
from medsilo.runs import paths
from medsilo_lab.consortium import lead
from medsilo_lab.jobs import write_job
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.secure.consortium import LEAD, MEMBER, RIVAL, SERVER, Consortium, wait_until
from tests.secure.test_resume import status_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("consortium")]
SITE = SITES[0]


def content(record: Record) -> dict[str, str]:
    files = (path for path in record.folder.rglob("*") if path.is_file() and path.name != paths.LOCK)
    return {str(path.relative_to(record.folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def unfinished(consortium: Consortium, tmp_path: Path) -> Iterator[tuple[str, Record]]:
    write_job(tmp_path / "mine", make_plan("fedavg", "training.rounds=500", sites=[SITE]), study="mine")
    job = lead.submit(tmp_path / "mine", consortium.kit(LEAD), print)
    record = Record(consortium.kit(SERVER) / "medsilo/mine")
    try:
        wait_until(lambda: len(record.rounds()) >= 2, 60, "the first rounds")
        yield job, record
    finally:
        if not status_of(consortium.kit(LEAD), job).startswith("FINISHED"):
            lead.cancel(job, consortium.kit(LEAD), print)


def statistics(consortium: Consortium, who: str, job: str) -> str:
    with lead.connected(consortium.kit(who)) as session:
        return str(session.show_stats(job, api_spec.TargetType.SERVER))


def watched(consortium: Consortium, who: str, job: str) -> list[str]:
    heard: list[str] = []
    with lead.connected(consortium.kit(who)) as session:
        watching = lead._Watching(job, lambda line, study: heard.append(f"round {line.round}"), heard.append)
        assert watching.look(session) is None
    return heard


@pytest.mark.long
def test_a_study_is_its_submitters(
    consortium: Consortium, unfinished: tuple[str, Record], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    job, record = unfinished
    mine, theirs, members = (consortium.kit(who) for who in (LEAD, RIVAL, MEMBER))

    # Only the study's lead can watch the running study; other people see neither the study's name nor its rounds.
    with lead.connected(mine) as session:
        told = lead._so_far(session, job, after=1)
        assert told and told.study == "mine" and told.rounds[0].round == 2
        assert [line.round for line in told.rounds] == list(range(2, len(told.rounds) + 2))
    for kit, who in ((theirs, RIVAL), (members, MEMBER)):
        with lead.connected(kit) as session:
            assert lead._so_far(session, job) is None
            with pytest.raises(api_spec.AuthorizationError):
                session.do_app_command(job, "medsilo.progress", {})
        (heard,) = watched(consortium, who, job)
        assert "somebody else submitted it" in heard
        said = statistics(consortium, who, job)
        assert "mine" not in said and "validation" not in said
        assert cli.main(["cancel", job, "--kit", str(kit)]) == 1

    # After an early end, for example a crash, another lead cannot submit the plan under the same study name.
    assert lead.cancel(job, mine, print) == "FINISHED:ABORTED"
    capsys.readouterr()
    for kit in (theirs, members):
        for command in (("resume", job), ("download", job, "--out", tmp_path / "rivals")):
            assert cli.main([*map(str, command), "--kit", str(kit)]) == 1
            assert "may not do this: not authorized" in capsys.readouterr().err
    before = content(record)
    assert {"plan.yaml", "rounds.jsonl", "summary.json", "lead.txt"} <= set(before)
    for resume in (True, False):
        again = tmp_path / f"again-{resume}"
        write_job(again, make_plan("fedavg", "training.rounds=500", sites=[SITE]), study="mine", resume=resume)
        with pytest.raises(MedsiloError) as refused:
            lead.submit(again, theirs, print)
        assert "study mine belongs to another lead" in str(refused.value)
        assert "\n" not in str(refused.value)
    with lead.connected(theirs) as session:
        rivals = [own["job_id"] for own in session.list_jobs(detailed=True) if own["submitter_name"] == RIVAL]
    assert len(rivals) == 2
    capsys.readouterr()
    for own in rivals:
        assert cli.main(["download", own, "--kit", str(theirs), "--out", str(tmp_path / "rivals")]) == 1
        assert "left no results" in capsys.readouterr().err
        with lead.connected(theirs) as session:
            session.download_job_result(own, str(tmp_path / "raw"))
    assert not list(tmp_path.glob("rivals/*")) and not list(tmp_path.glob("raw/**/medsilo/*"))
    assert content(record) == before

    new = lead.resume(job, mine, print)
    rounds = len(record.rounds())
    wait_until(lambda: len(record.rounds()) > rounds, 60, "the rounds after it")
    assert lead.cancel(new, mine, print) == "FINISHED:ABORTED"
    assert lead.download(new, mine, tmp_path / "runs").name == "mine"
