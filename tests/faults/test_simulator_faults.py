"""After a fault in real NVFlare processes, the user gets a message, files remain, and hospitals' data stay apart."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from medsilo.cli import main
from medsilo.core.errors import MedsiloError
from medsilo.flare.jobs import CUSTOM
from medsilo.plan import Plan
from medsilo.site.settings import PrivacyRequirements, SiteSettings
from medsilo_lab.engines import inprocess, simulator
from medsilo_lab.jobs import canonical_job, write_job
from medsilo_server.record import Record
from tests.conftest import SITES, make_plan
from tests.federation.test_simulator import assert_same_outcome
from tests.sites import CPU

ONE, TWO = SITES[:1], SITES[:2]

# An executor that fails like a hospital's broken machine; the job's `custom` folder contains the executor.
FAULTY = """
import time
import torch
from medsilo.flare.executor import MedsiloExecutor
from medsilo.federation import trainer


class Faulty(MedsiloExecutor):
    def __init__(self, site, fault, round_number):
        super().__init__()
        self.site, self.fault, self.round_number = site, fault, round_number

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        self.mine = fl_ctx.get_identity_name() == self.site
        if self.mine:
            self._break()
        return super().execute(task_name, shareable, fl_ctx, abort_signal)

    def _break(self):
        fault, when = self.fault, self.round_number
        train = trainer.Trainer.work

        def broken(self, number, phase, stop):
            loss = train(self, number, phase, stop)
            if number == when:
                if fault == "raise":
                    raise ValueError("/data/patients/MUELLER_HANS_1961.nii.gz is truncated")
                if fault == "nan":
                    next(self.state.model.parameters()).data.view(-1)[0] = float("nan")
                if fault == "hang":
                    while True:
                        stop()
                        time.sleep(0.05)
            return loss

        trainer.Trainer.work = broken
"""

# Takes the free port that NVFlare has found for a site's process.
TAKEN = """
import os, socket, struct, sys, threading, time

if "medsilo_lab.engines.simulator" in sys.orig_argv:
    from nvflare.private.fed.app.simulator import simulator_runner

    free, left = simulator_runner.get_open_ports, [None] * int(os.environ["TAKEN_TIMES"])

    def hang_up(listener):
        caller = listener.accept()[0]
        time.sleep(float(os.environ["TAKEN_AFTER"]))
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.close()
        listener.close()

    def taken(number):
        asks = sys._getframe(1)
        if asks.f_code.co_name != "do_one_task" or asks.f_locals["client"].client_name != "hospital-b" or not left:
            return free(number)
        left.pop()
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=hang_up, args=[listener], daemon=True).start()
        return [listener.getsockname()[1]]

    simulator_runner.get_open_ports = taken
"""


def run_with_fault(folder: Path, fault: str, *changes: str, sites: list[str] | None = None) -> Record:
    plan = make_plan("fedavg", *changes, sites=sites)
    job = folder / "faulty-job"
    write_job(job, plan)
    config = canonical_job(plan)
    (job / CUSTOM).mkdir()
    (job / CUSTOM / "faulty.py").write_text(FAULTY)
    path = next(path for path in config if path.name == "config_fed_client.json")
    config[path]["executors"][0]["executor"] = {
        "path": "faulty.Faulty",
        "args": {"site": "hospital-b", "fault": fault, "round_number": 2},
    }
    simulator.write_json(job / path, config[path])
    return simulator.run(plan, folder / "run", CPU, job)


def all_texts(folder: Path) -> str:
    paths = [path for path in folder.rglob("*") if path.suffix in {".json", ".jsonl", ".yaml", ".log", ".txt", ".csv"}]
    return "\n".join(path.read_text(errors="replace") for path in paths if path.name != "errors.log")


@pytest.mark.slow
def test_an_exception_at_a_site_is_a_refusal_without_patient_data(tmp_path: Path) -> None:
    with pytest.raises(MedsiloError, match=r"hospital-b refused: ValueError"):
        run_with_fault(tmp_path, "raise", sites=["hospital-b"])
    record = Record(tmp_path / "run")
    assert record.summary().status == "failed"
    assert record.rounds()[-1].refused.keys() == {"hospital-b"}
    assert record.load_checkpoint()[1]["round"] == 1
    assert "MUELLER" not in all_texts(tmp_path / "run")
    own_log = tmp_path / "run" / "sites" / "hospital-b" / "errors.log"
    assert "MUELLER" in own_log.read_text()


@pytest.mark.long
@pytest.mark.slow
def test_going_on_without_a_site_that_diverged_and_taking_it_back(tmp_path: Path) -> None:
    changes = ("training.rounds=3", "participation.minimum=2", "participation.when_missing=continue")
    record = run_with_fault(tmp_path, "nan", *changes)
    rounds = record.rounds()
    assert [sorted(line.answered) for line in rounds] == [SITES, ["hospital-a", "hospital-c"], SITES]
    assert "NaN" in rounds[1].refused["hospital-b"]
    summary = record.summary()
    assert summary.status == "finished"
    assert summary.sites["hospital-b"].missed.keys() == {2}
    assert summary.sites["hospital-b"].contributed == 2


@pytest.mark.long
@pytest.mark.slow
def test_a_site_that_hangs_costs_its_time_and_no_more(tmp_path: Path) -> None:
    changes = ("participation.minimum=2", "participation.when_missing=continue", "participation.timeout=30")
    with pytest.raises(MedsiloError, match="2 of 3 sites answered"):
        run_with_fault(tmp_path, "hang", *changes, "participation.minimum=3", "participation.when_missing=stop")
    line = Record(tmp_path / "run").rounds()[-1]
    assert line.lost["hospital-b"] == "no answer within 30 s"
    assert line.seconds < 40


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_numbers(tmp_path: Path) -> None:
    rounds = 20  # many rounds, so that the kill comes before the end of the run
    plan = make_plan("fedbn", f"training.rounds={rounds}", sites=TWO)
    inprocess.run(plan, folder=tmp_path / "loop")
    kill_after_round(plan_job(tmp_path, plan), tmp_path / "runs", "killed", 3)
    run = tmp_path / "runs" / "killed"
    # The server writes a round's line before the round's checkpoint. If the run is killed between these two writes, the
    # resumed run repeats the round.
    assert 2 <= Record(run).load_checkpoint()[1]["round"] < rounds
    simulator.resume(run, CPU)
    assert [line.round for line in Record(run).rounds()] == [*range(1, rounds + 1)]
    assert_same_outcome(tmp_path / "loop", run)


def plan_job(folder: Path, plan: Plan) -> Path:
    write_job(folder / "job", plan)
    return folder / "job"


def kill_after_round(job: Path, out: Path, name: str, round_number: int) -> None:
    command = [sys.executable, "-m", "medsilo", "run", str(job), "--out", str(out), "--name", name]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 600
        while len(Record(out / name).rounds()) < round_number:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
    finally:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            member.send_signal(signal.SIGKILL)
        process.wait()


def job_with_a_part(folder: Path, side: str, code: str) -> Path:
    job = plan_job(folder, make_plan(sites=ONE))
    (job / CUSTOM).mkdir()
    (job / CUSTOM / "extra.py").write_text(code)
    path = job / f"app/config/config_fed_{side}.json"
    config = yaml.safe_load(path.read_text())
    config["components"] = [{"id": "extra", "path": "extra.Extra", "args": {}}]
    simulator.write_json(path, config)
    return job


@pytest.mark.slow
def test_a_missing_import_ends_in_seconds_with_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_with_a_part(tmp_path, "client", "import a_package_nobody_has\n\nclass Extra: ...\n")
    started = time.monotonic()
    assert main(["run", str(job), "--out", str(tmp_path / "runs")]) == 1
    assert "a_package_nobody_has" in capsys.readouterr().err.splitlines()[-1]
    assert time.monotonic() - started < 100  # NVFlare gives sites 120 s to answer


@pytest.mark.slow
def test_missing_data_end_in_seconds_with_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = plan_job(tmp_path, make_plan())
    started = time.monotonic()
    assert main(["run", str(job), "--out", str(tmp_path / "runs"), "--data", str(tmp_path / "nowhere")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "data folder" in last and "--data" in last and last.endswith(f"[{tmp_path / 'nowhere'}]")
    assert time.monotonic() - started < 100
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_what_could_not_start_leaves_its_name_free(tmp_path: Path) -> None:
    """The run fails before NVFlare starts, during the start of NVFlare, or because no site joins; the log of the failed
    run remains.
    """
    plan, run = make_plan("fedavg", "training.rounds=1", sites=ONE), tmp_path / "runs" / "run"
    with pytest.raises(MedsiloError, match="cuda:7"):
        simulator.run(plan, run, SiteSettings(device="cuda:7"))
    assert not run.exists()
    job = job_with_a_part(tmp_path, "server", "class Extra:\n    def __init__(self):\n        1 / 0\n")
    with pytest.raises(MedsiloError, match="NVFlare ended without a result"):
        simulator.run(plan, run, CPU, job)
    assert {path.name for path in run.iterdir()} == {"nvflare.log"}
    with pytest.raises(MedsiloError, match="0 of 1 sites answered"):
        simulator.run(plan, run, SiteSettings(device="cpu", privacy=PrivacyRequirements(epsilon=1.0, delta=1e-5)))
    assert simulator.run(plan, run, CPU).summary().finished
    log = (run / "nvflare.log").read_text()
    assert "ZeroDivisionError" in log and "0 of 1 sites answered" in log
    with pytest.raises(MedsiloError, match="exists; choose another --name"):
        simulator.run(plan, run, CPU)


def take_ports(folder: Path, monkeypatch: pytest.MonkeyPatch, times: int, after: float) -> None:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(TAKEN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("TAKEN_TIMES", str(times))
    monkeypatch.setenv("TAKEN_AFTER", str(after))


@pytest.mark.long
@pytest.mark.parametrize("after", [pytest.param(0.0, marks=pytest.mark.long), 1.0])
def test_a_port_that_another_program_took_costs_nothing(
    after: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another program takes a site's port, NVFlare 2.9 alone would run the study without this site."""
    plan = make_plan("fedbn", sites=TWO)
    take_ports(tmp_path / "taken", monkeypatch, 1, after)
    simulator.run(plan, tmp_path / "run", CPU)
    assert (tmp_path / "run/nvflare.log").read_text().count("answered in the place of hospital-b") == 1
    monkeypatch.setenv("TAKEN_TIMES", "0")
    inprocess.run(plan, folder=tmp_path / "loop")
    assert_same_outcome(tmp_path / "loop", tmp_path / "run")


@pytest.mark.slow
def test_a_site_that_never_begins_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_ports(tmp_path / "taken", monkeypatch, 100, 0.0)
    started = time.monotonic()
    with pytest.raises(MedsiloError, match="1 of 2 sites.*hospital-b lost: its process"):
        simulator.run(make_plan("fedavg", sites=TWO), tmp_path / "run", CPU)
    assert time.monotonic() - started < 110  # NVFlare gives each site 120 s to answer
