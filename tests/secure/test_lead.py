"""Run the lead's commands against a real server and real hospitals."""

import io
import logging
import threading
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode as CellCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message

from medsilo import cli
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.deploy.supermodel import SuperModel
from medsilo.flare.leftovers import find_in_kit
from medsilo.runs.clean import remove
from medsilo.runs.reading import read_summary
from medsilo.site.settings import EachSites, SiteSettings
from medsilo_lab.consortium import lead
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from nvflare_reliability.cleanup import MOST
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.secure.consortium import LEAD, MEMBER, SERVER, Consortium, wait_until
from tests.secure.relay import Line, Relay
from tests.secure.test_mutual_tls import TEACHING, gathered
from tests.unit.cli.test_houserules import modules_after
from tests.unit.project.test_published import holds

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("consortium")]


def medsilo(*arguments: object) -> tuple[int, list[str], list[str]]:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = cli.main(list(map(str, arguments)))
    said = [line for line in err.getvalue().splitlines() if not line.startswith("trying ")]
    return code, out.getvalue().splitlines(), said


@pytest.fixture(scope="module")
def never_began(consortium: Consortium, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, settings = tmp_path_factory.mktemp("never-began"), consortium.kit(SITES[0]) / "local/medsilo.yaml"
    before = settings.read_text()
    write_job(folder / "job", make_plan("fedbn", sites=TEACHING), study="tried-again")
    settings.write_text("device: cuda:7\n")
    try:
        with pytest.raises(MedsiloError, match=f"not started: .*join: 1 of 2 sites answered.*{SITES[0]} refused"):
            lead.submit(folder / "job", consortium.kit(LEAD), print)
    finally:
        settings.write_text(before)
    assert read_summary(consortium.kit(SERVER) / "medsilo/tried-again").never_began
    return "tried-again"


@dataclass(frozen=True)
class Watched:
    job: str
    study: str
    loop: Path


@pytest.fixture(scope="module")
def watched(consortium: Consortium, never_began: str, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder, refuses = tmp_path_factory.mktemp("watched"), TEACHING[1]
    plan = make_plan("fedsm", "training.rounds=25", "model_selection.keep=last", sites=TEACHING)
    unwilling = SiteSettings(device="cpu", share_personal_model=False)
    inprocess.run(plan, folder=folder / "loop", settings=EachSites(device="cpu", sites={refuses: unwilling}))
    write_job(folder / "job", plan, study=never_began)
    kit, settings = consortium.kit(LEAD), consortium.kit(refuses) / "local/medsilo.yaml"
    before = settings.read_text()
    settings.write_text(before + "share_personal_model: false\n")
    try:
        code, out, err = medsilo("submit", folder / "job", "--kit", kit)
        job = out[0]
        assert (code, out, err) == (0, [job], [f"medsilo: submitted as {job}; waits until the hospitals have joined"])
        assert not [line for line in consortium.log(SERVER).splitlines() if job in line and " - ERROR - " in line]
        code, _, err = medsilo("download", job, "--kit", kit, "--out", folder / "too-early")
        assert code == 1 and len(err) == 1 and "--watch" in err[0]

        running = [one.path for party in (SERVER, *SITES) for one in find_in_kit(consortium.kit(party), 1e-9)]
        assert not any(job in path.name for path in running)
        code, out, err = medsilo("status", job, "--watch", "--kit", kit)
    finally:
        settings.write_text(before)
    assert (code, err) == (0, [])
    rounds = [line.split()[:3] for line in out if line.startswith("round ") and "/25 " in line]
    assert rounds == [["round", f"{number:>2}/25".strip(), site] for number in range(1, 26) for site in TEACHING]
    assert out[-1].startswith("FINISHED:COMPLETED; results: medsilo download")
    return Watched(job, never_began, folder / "loop")


def test_a_study_that_could_not_start_leaves_its_name_free(
    consortium: Consortium, watched: Watched, tmp_path: Path
) -> None:
    """The name of a study that could not start stays free for a job with a different plan.

    A third job with the same study name is rejected, and the third job's status shows no rounds of the finished study.
    """
    kit, summary = consortium.kit(LEAD), read_summary(consortium.kit(SERVER) / "medsilo" / watched.study)
    assert summary.finished and summary.method == "fedsm"
    write_job(tmp_path / "job", make_plan("fedavg", sites=TEACHING[:1]), study=watched.study)
    code, out, err = medsilo("submit", tmp_path / "job", "--kit", kit)
    assert (code, out) == (1, []) and "not started" in err[-1] and f"{watched.study} exists" in err[-1]
    code, out, _ = medsilo("status", lead.status(kit).jobs[0].id, "--watch", "--kit", kit)
    assert code == 1 and not [line for line in out if line.startswith("round ")]
    assert any(f"{watched.study} exists" in line for line in out)


def test_fetch_brings_the_super_model_without_those_who_did_not_agree(
    consortium: Consortium, watched: Watched, tmp_path: Path
) -> None:
    """Results at the hospitals and the server equal the results of the same study in one process."""
    kit, job = consortium.kit(LEAD), watched.job
    agrees, not_asked, _ = SITES
    code, out, err = medsilo("download", job, "--kit", kit, "--out", tmp_path / "runs")
    assert (code, err) == (0, [])
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "report.html").exists() and read_summary(run).status == "finished"
    (mine, _), (theirs, _) = (load_tensors(folder / "global/last.safetensors") for folder in (run, watched.loop))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    files = {"plan.yaml", "provenance.json", "jobs.txt", "rounds.jsonl", "summary.json", "global", "report.html"}
    assert {path.name for path in run.iterdir()} == {*files, "supermodel"}
    assert not (consortium.kit(not_asked) / job).exists()  # a hospital outside the plan receives no data of the study
    assert SuperModel.load(run / "supermodel").agreed == (agrees,)
    for site in TEACHING:
        own = load_tensors(consortium.kit(site) / "medsilo" / run.name / "sites" / site / "best.safetensors")[0]
        assert holds(run, own) == (site == agrees)
    assert_same_outcome(watched.loop, gathered(consortium, run.name, TEACHING, tmp_path / "secure"))

    (run / "notes.txt").write_text("mine")
    (run / "summary.json").unlink()
    code, _, err = medsilo("download", job, "--kit", kit, "--out", tmp_path / "runs")
    assert (code, err) == (0, []) and read_summary(run).status == "finished"
    assert (run / "notes.txt").read_text() == "mine"

    gave_back = [
        [one for one in find_in_kit(consortium.kit(party), 1e-9) if job in one.path.name] for party in (SERVER, *SITES)
    ]
    assert [len(old) for old in gave_back] == [1, 1, 0, 1] and all(remove(old) > 0 for old in gave_back if old)
    code, _, err = medsilo("download", job, "--kit", kit, "--out", tmp_path / "again")
    assert code == 1 and len(err) == 1 and job in err[0]
    code, out, _ = medsilo("status", "--kit", consortium.kit(MEMBER))
    assert code == 0
    assert [line.split("; ")[0] for line in out[1:4]] == [f"{site}: connected" for site in SITES]
    assert not any(job in line for line in out)


def test_refusals_are_one_line(consortium: Consortium, tmp_path: Path) -> None:
    write_job(tmp_path / "job", make_plan("fedavg"))
    kit, member = consortium.kit(LEAD), consortium.kit(MEMBER)
    absent = "participation.sites=[hospital-a,hospital-z]"
    unknown = ("participation.minimum=1", "--set", absent, "--set", "participation.when_missing=continue")
    for arguments, words in [
        (
            ("submit", tmp_path / "job", "--kit", kit, "--set", absent),
            "hospital-z, but only these are connected: hospital-a",
        ),
        (
            ("submit", tmp_path / "job", "--kit", kit, "--set", *unknown),
            "no hospital here is called 'hospital-z'; known",
        ),
        (("submit", tmp_path / "job", "--kit", member), "not authorized"),
        (("submit", tmp_path / "job", "--kit", tmp_path), "the folder is not a kit"),
        (("submit", tmp_path / "job", "--kit", kit, "--set", "training.rounds=x"), "training.rounds"),
        (("status", "no-such-job", "--watch", "--kit", kit), "medsilo status"),
        (("cancel", "no-such-job", "--kit", kit), "no-such-job"),
        (("download", "no-such-job", "--kit", kit), "no-such-job"),
    ]:
        code, out, err = medsilo(*arguments)
        assert (code, out, len(err)) == (1, [], 1) and words in err[0], (arguments, err)


def test_watching_survives_a_lost_connection_and_abort_ends_it(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_job(tmp_path / "job", make_plan("fedavg", "training.rounds=500", sites=[SITES[0]]))
    monkeypatch.setattr(lead, "CONNECT", 10.0)
    job = lead.submit(tmp_path / "job", consortium.kit(LEAD), print)
    told: list[int] = []
    said: list[str] = []
    ended: list[tuple[str, str]] = []
    with Relay(consortium.port) as relay:
        kit = relay.kit(consortium.kit(LEAD), tmp_path / "kit")

        def watch() -> None:
            ended.append(lead.watch(job, kit, lambda record, study: told.append(record.round), said.append))

        watching = threading.Thread(target=watch)
        watching.start()
        wait_until(lambda: len(told) > 0, 600, "the first round")
        relay.cut()
        wait_until(lambda: any("does not answer" in line for line in said), 600, "the loss to be told")
        before = len(told)
        relay.mend()
        wait_until(lambda: len(told) > before, 600, "the rounds after it")
        assert medsilo("cancel", job, "--kit", kit)[0] == 0
        watching.join(timeout=600)
    assert ended == [(job, "FINISHED:ABORTED")]
    assert told == list(range(1, len(told) + 1)) and len(told) < 500


def test_a_study_is_resumed_at_once_after_its_job_was_aborted(consortium: Consortium, tmp_path: Path) -> None:
    kit = consortium.kit(LEAD)
    write_job(tmp_path / "job", make_plan("fedavg", "training.rounds=500", sites=[SITES[0]]), study="at-once")
    job = lead.submit(tmp_path / "job", kit, print)
    code, _, err = medsilo("cancel", job, "--kit", kit)
    assert code == 0 and [line for line in err if job in line and "waits" in line]
    assert f"{LEAD} cancelled it" in str(read_summary(consortium.kit(SERVER) / "medsilo/at-once").reason)
    code, resumed, err = medsilo("resume", job, "--kit", kit)
    try:
        assert code == 0, err
    finally:
        (new,) = resumed or [job]
        assert lead.cancel(new, kit, print) == lead.cancel(new, kit, print) == "FINISHED:ABORTED"


def test_a_poll_loads_little_and_reads_no_other_folder(
    consortium: Consortium, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without medsilo, NVFlare would search the current folder for NVFlare's files."""
    (tmp_path / "another-kit").mkdir()
    (tmp_path / "another-kit/comm_config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    status = ["status", "--kit", str(consortium.kit(LEAD)), "--require", ",".join(SITES)]
    loaded = modules_after(root, status)
    assert "nvflare.fuel.flare_api.flare_api" in loaded and loaded & {"torch", "numpy", "aiohttp"} == set()


def test_the_server_is_named_when_it_does_not_answer(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lead, "CONNECT", 1.0)
    monkeypatch.setattr(logging.root, "handlers", [])  # without pytest's handlers, warnings go to stderr
    with Relay(consortium.port) as relay:
        kit = relay.kit(consortium.kit(LEAD), tmp_path / "kit")
        relay.cut()
        code, _, err = medsilo("status", "--kit", kit)
    assert code == 1 and err == [
        f"medsilo: the server at {SERVER}:{relay.port} does not answer; is it started, and the way to it open?"
    ]


def test_a_connection_that_comes_too_late_is_given_up(
    consortium: Consortium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without medsilo, NVFlare waits forever if a connection's handshake ends only after the timeout."""
    monkeypatch.setattr(lead, "CONNECT", 2.0)
    with Relay(consortium.port, Line(delay=1.5)) as far:
        kit = far.kit(consortium.kit(LEAD), tmp_path / "kit")
        ended: list[tuple] = []
        asking = threading.Thread(target=lambda: ended.append(medsilo("status", "--kit", kit)), daemon=True)
        asking.start()
        asking.join(600)
        assert len(ended) == 1 and ended[0][0] == 1 and "does not answer" in ended[0][2][0]


def test_the_servers_own_process_takes_no_large_message(consortium: Consortium) -> None:
    where = {"channel": CellChannel.HCI, "target": "server", "topic": "command"}
    session = consortium.session()
    try:
        for size in (MOST // 2, MOST, 1000):
            asked = new_cell_message({}, "x" * size)
            reply = session.api.cell.send_request(**where, request=asked, timeout=20.0)
            refused = reply.get_header(MessageHeaderKey.RETURN_CODE) == CellCode.COMM_ERROR
            assert refused == (size == MOST) and (refused or "protocol violation" in reply.payload)
            assert not refused or "exceeds configured limit" in reply.get_header(MessageHeaderKey.ERROR)
    finally:
        session.close()
