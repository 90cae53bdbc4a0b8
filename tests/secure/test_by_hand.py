"""Run a job as provisioning/README.md describes, in NVFlare's admin console and with NVFlare's commands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from medsilo import cli
from medsilo.core.files import load_tensors
from medsilo_lab.engines import inprocess
from medsilo_lab.jobs import write_job
from tests.conftest import SITES, make_plan
from tests.secure.consortium import LEAD, REGISTERED, Consortium, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("consortium")]


def environment(consortium: Consortium) -> dict[str, str]:
    return {**consortium.environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def console(consortium: Consortium, *commands: str) -> str:
    script = consortium.kit(LEAD) / "startup/fl_admin.sh"
    typed = "\n".join([LEAD, *commands, "bye", ""])
    done = subprocess.run(
        [script], input=typed, env=environment(consortium), capture_output=True, text=True, timeout=600, check=True
    )
    return done.stdout


def nvflare(consortium: Consortium, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "nvflare.cli", "job", *map(str, arguments)]
    command += ["--startup-kit", str(consortium.kit(LEAD)), "--format", "json"]
    done = subprocess.run(command, env=environment(consortium), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])["data"]


def test_the_containers_entry_point_runs_a_kit(consortium: Consortium, root: Path) -> None:
    """The test runs the entry point of the container image on this machine; the hospital registers, and its process
    ends on request.
    """
    site, entry = SITES[2], root / "provisioning/containers/entrypoint.sh"
    consortium.end(consortium.processes[site])
    before = len(consortium.log(site))
    with (consortium.root / f"{site}.log").open("a") as log:
        changed = {**environment(consortium), "KIT": str(consortium.kit(site))}
        process = subprocess.Popen([entry, "site"], env=changed, stdout=log, stderr=log, start_new_session=True)
    try:
        consortium.wait_for_log(site, REGISTERED, before)
    finally:
        process.terminate()
        assert process.wait(60) is not None
        before = len(consortium.log(site))
        consortium.start_party(site)
        consortium.wait_for_log(site, REGISTERED, before)


@pytest.mark.long
def test_the_console_and_nvflares_commands_run_the_same_job(consortium: Consortium, tmp_path: Path) -> None:
    plan = make_plan("fedavg", sites=SITES)
    inprocess.run(plan, folder=tmp_path / "loop")
    write_job(tmp_path / "job", plan)
    transfer = consortium.kit(LEAD) / "transfer"
    assert cli.main(["submit", str(tmp_path / "job"), "-o", str(transfer / "by-console")]) == 0
    assert cli.main(["submit", str(tmp_path / "job"), "-o", str(tmp_path / "by-command")]) == 0

    write_job(transfer / "endless", make_plan("fedavg", "training.rounds=500", sites=[SITES[0]]))

    said = console(consortium, "check_status server", "submit_job by-console", "submit_job endless", "list_jobs")
    by_console, endless = re.findall(r"Submitted job: (\S+)", said)
    assert all(site in said for site in SITES)
    session = consortium.session()
    # the second study starts after the first, because hospital-a runs two studies at once and an endless study is one
    # of them
    try:
        wait_until(lambda: session.get_job_status(by_console) == "FINISHED:COMPLETED", 300, by_console)
        by_command = nvflare(consortium, "submit", "-j", tmp_path / "by-command")["job_id"]
        wait_until(lambda: session.get_job_status(by_command) == "FINISHED:COMPLETED", 300, by_command)
    finally:
        session.close()
    said = console(
        consortium,
        f"list_jobs {by_console}",
        f"list_jobs -d {endless}",
        f"download_job {by_console}",
        f"app_command {endless} medsilo.progress",
        f"abort_job {endless}",
        "y",
    )
    assert "FINISHED:COMPLETED" in said and '"status": "RUNNING"' in said and "validation_loss" in said
    found = nvflare(consortium, "download", by_command, "-o", tmp_path / "downloads")["artifacts"]
    lines = [json.loads(line) for line in Path(found["round_metrics"]).read_text().splitlines()]
    assert [line["round"] for line in lines] == [*range(plan.rounds + 1)]
    assert all([site["name"] for site in line["sites"]] == SITES for line in lines)
    assert json.loads(Path(found["metrics_summary"]).read_text())["key_metric"]["name"] == plan.task.goal.metric
    assert Path(found["global_model"]).parts[-2:] == ("global", "best.safetensors")
    theirs = load_tensors(tmp_path / "loop/global/best.safetensors")[0]
    for folder in (transfer / by_console, tmp_path / "downloads" / by_command):
        (model,) = folder.glob("workspace/medsilo/*/global/best.safetensors")
        mine = load_tensors(model)[0]
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    session = consortium.session()
    try:
        wait_until(lambda: session.get_job_status(endless) == "FINISHED:ABORTED", 600, "the abort")
    finally:
        session.close()
