"""Commands for a consortium's lead: submit, status, cancel, download."""

import gc
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.cli import options
from medsilo.cli.options import option
from medsilo.cli.running import conclude
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError
from medsilo.runs.progress import Moment, StudyProgress

if TYPE_CHECKING:
    from medsilo.runs.rounds import Progress


def _connecting(screen: Console, kit: Path) -> None:
    """Name the server before waiting for it: one that is down does not answer. Load what speaks with it."""
    from medsilo.check.kit import read_kit

    with suppress(MedsiloError):  # what is wrong with a kit the work itself says
        own = read_kit(kit, "person")
        screen.aside(f"trying {own.host}:{own.port} (15 s at most)")
    if gc.isenabled() and not gc.get_freeze_count():  # looking for garbage in what stays is a tenth of a poll's time
        gc.disable()
        import medsilo_lab.consortium.lead  # noqa: F401

        gc.freeze()
        gc.enable()


def submit(
    screen: Console,
    job: options.JobOrNone = None,
    *,
    kit: Annotated[Path | None, option("KIT", options.OWN_KIT)] = None,
    canary: Annotated[
        bool,
        typer.Option(
            "--canary", help="instead of a job: one round on synthetic data, which shows which hospitals are ready"
        ),
    ] = False,
    plan: options.PlanFile = None,
    changes: options.Changes,
    out: options.OutFolderOrNone = None,
) -> int:
    """Submit a job to a consortium, or write it into a folder as it would be submitted.

    Waits until all hospitals have joined (at most 2 minutes), says why one can't, and prints the job's id. With --out
    nothing is sent: that is for NVFlare's own tools, and for hospitals that review a job before they run it. The job
    has no code, so it runs where NVFlare's list of classes has medsilo's, as in kits of 'medsilo kits'.

    With --canary each hospital says within two minutes whether its package fits and its data can be read. It names
    its GPUs and its memory, and its line is measured. The command ends with 1 unless all are ready.
    """
    if canary:
        return _send_canary(screen, job, kit, changes)
    if job is None:
        raise MedsiloError("which job? give its folder, such as jobs/fedavg, or --canary")
    if (kit is None) == (out is None):
        raise MedsiloError("where to? give --kit to submit the job, or --out to write it into a folder")
    screen.note("checking the job")
    from medsilo.flare import jobs

    found = jobs.find_job(job)
    if kit:
        _connecting(screen, kit)
        from medsilo_lab.consortium import lead

        submitted: str | Path = lead.submit(found, kit, screen.warn, changes, plan)
    else:
        assert out
        jobs.write_job(out, jobs.plan_of(found, changes, plan), found)
        submitted = out
    screen.say(f"job: {submitted}" if out else str(submitted))
    screen.answer(job=submitted)
    return 0


def _send_canary(screen: Console, job: str | None, kit: Path | None, changes: list[str]) -> int:
    if job or kit is None:
        raise MedsiloError("--canary sends a job of its own; give --kit, and no job")
    _connecting(screen, kit)
    from medsilo_lab.consortium import canary

    results = canary.send(kit, changes, screen.warn)
    screen.say(*(one.line(name) for name, one in results.items()))
    screen.answer(hospitals={name: one.as_json() for name, one in results.items()})
    return 0 if all(one.ready for one in results.values()) else 1


def status(
    screen: Console,
    job: Annotated[str | None, typer.Argument(metavar="ID", help="one job's id (default: all)")] = None,
    *,
    kit: options.Kit,
    watch: Annotated[bool, typer.Option("--watch", help="show the job's rounds, until it ends")] = False,
    require: Annotated[
        str | None, option("A,B", "for monitoring: end with 1 unless all these hospitals are connected")
    ] = None,
) -> int:
    """Say who is connected and what runs; with --watch show a job's rounds, one line per site, until it ends.

    Lists connected hospitals, when the server last heard them, and their rounds; then the latest 20 jobs, with id and
    state. It says why a submitted job waits. With --watch it follows a study that goes on into its next job, and ends
    with 0 if the study finished, else with 1. Ctrl-C ends the watching, not the job.
    """
    if watch and job is None:
        raise MedsiloError("which job? give the id that submit printed; 'medsilo status' lists the latest")
    _connecting(screen, kit)
    from medsilo_lab.consortium import lead

    if watch and job:
        return _watch(screen, job, kit)
    state = lead.status(kit, None if require else job)
    screen.say(*state.lines())
    screen.answer(**state.as_json())
    here = {hospital.name for hospital in state.hospitals if hospital.connected}
    missing = sorted({name.strip() for name in (require or "").split(",") if name.strip()} - here)
    if missing:
        screen.warn(f"not connected: {', '.join(missing)}")
    return 1 if missing else 0


def _watch(screen: Console, job: str, kit: Path) -> int:
    from medsilo_lab.consortium import lead

    screen.in_lines = True
    told, at = Moment(), time.monotonic()
    progress = StudyProgress((), 0, "score", look=lambda: replace(told, age=time.monotonic() - at))
    screen.answer(job=job)

    def stands(study: "Progress") -> None:
        nonlocal told, at
        progress.planned, progress.metric, progress.steps = study.planned, study.metric, study.steps
        told, at = Moment(study.turns, away=study.away), time.monotonic()

    try:
        with screen.rounds(progress) as on_round:
            job, ended = lead.watch(job, kit, lambda line, study: on_round(line), screen.say, stands)
    except KeyboardInterrupt:
        screen.warn(f"no longer watching; the job goes on (to end it: medsilo cancel {job} --kit {kit})")
        return 130
    screen.say(f"{ended}; results: medsilo download {job} --kit {kit}")
    screen.answer(job=job, status=ended)
    if ended == "FINISHED:COMPLETED":
        return 0
    screen.say(f"to go on from the last finished round: medsilo resume {job} --kit {kit}")
    return 1


def cancel(screen: Console, job: options.JobId, *, kit: options.Kit) -> None:
    """End a job, and wait until it has ended.

    Finished rounds are kept: 'medsilo resume' continues after them.
    """
    _connecting(screen, kit)
    from medsilo_lab.consortium import lead

    ended = lead.cancel(job, kit, screen.warn)
    screen.say(ended)
    screen.answer(job=job, status=ended)


def download(screen: Console, job: options.JobId, *, kit: options.Kit, out: options.OutFolder = Path("runs")) -> None:
    """Download a job's results and write the report.

    Scores, rounds and shared models of a job that ended; hospitals' own models stay with them.
    """
    _connecting(screen, kit)
    from medsilo_lab.consortium import lead

    conclude(screen, lead.download(job, kit, out))


SUBMIT = Command(
    submit,
    'jobs/fedbn --kit kits/lead@clinic.example --set "participation.sites=[st-anna,university-clinic]"',
    "For a consortium's lead",
)
STATUS = Command(status, "--kit KIT", "For a consortium's lead")
CANCEL = Command(cancel, "ID --kit KIT", "For a consortium's lead")
DOWNLOAD = Command(download, "ID --kit KIT", "For a consortium's lead")
