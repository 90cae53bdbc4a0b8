"""Commands for a consortium's lead: submit, canary, status, cancel, download."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.cli import options
from medsilo.cli.options import option
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError
from medsilo.runs.progress import Moment, StudyProgress
from medsilo_lab.cli.running import conclude

if TYPE_CHECKING:
    from medsilo.runs.rounds import Progress


def _connecting(screen: Console, kit: Path) -> None:
    """Print the server's name before the program waits for the server's answer.

    Modules that connect to the server must be imported inside the `with` block.
    """
    from medsilo.check.kit import read_kit

    with suppress(MedsiloError):  # a faulty kit is reported later, by the command that connects with the kit
        own = read_kit(kit, "person")
        screen.aside(f"trying {own.host}:{own.port} (15 s at most)")
    with _loading():
        import medsilo_lab.consortium.lead  # noqa: F401


@contextmanager
def _loading() -> Iterator[None]:
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def submit(
    screen: Console,
    job: options.JobOrNone = None,
    *,
    kit: Annotated[Path | None, option("KIT", options.OWN_KIT)] = None,
    plan: options.PlanFile = None,
    changes: options.Changes,
    out: options.OutFolderOrNone = None,
) -> int:
    """Submit a job to a consortium, or write the prepared job into a folder.

    The command waits at most two minutes until all hospitals have joined. The command prints the job's id, or the
    reason why a hospital can't join. With --out, the command only writes the job, for example so that hospitals can
    review it before NVFlare's own tools submit it. A job without a training script contains no code. Such a job runs
    wherever NVFlare's class allow-list contains medsilo's classes, as in kits of 'medsilo kits'.
    """
    options.check_changes(changes, job, plan)
    if job is None:
        raise MedsiloError("which job? give its folder, such as jobs/fedavg")
    if (kit is None) == (out is None):
        raise MedsiloError("where to? give --kit to submit the job, or --out to write it into a folder")
    screen.note("checking the job")
    with _loading():
        # NVFlare must be imported before PyTorch, because NVFlare inspects all loaded modules when it is imported
        if kit:
            import medsilo_lab.consortium.lead  # noqa: F401
        from medsilo.flare.job_source import find_job
        from medsilo.flare.jobs import plan_of

    found = find_job(job)
    if kit:
        _connecting(screen, kit)
        from medsilo_lab.consortium import lead

        submitted: str | Path = lead.submit(found, kit, screen.warn, changes, plan)
    else:
        assert out
        from medsilo_lab.jobs import write_job

        write_job(out, plan_of(found, changes, plan), found)
        submitted = out
    screen.say(f"job: {submitted}" if out else str(submitted))
    screen.answer(job=submitted)
    return 0


def canary(screen: Console, *, kit: options.Kit, changes: options.Changes) -> int:
    """Run a short test study on synthetic data, to find out which hospitals are ready for a real study.

    Within two minutes, each hospital reports whether its packages match and its own data can be read, and its GPUs and
    free memory. The server measures the speed of each hospital's connection. The exit code is 0 only if all hospitals
    are ready.
    """
    options.check_changes(changes)
    _connecting(screen, kit)
    from medsilo_lab.consortium.canary import send

    results = send(kit, changes, screen.warn)
    screen.say(*(result.line(name) for name, result in results.items()))
    screen.answer(hospitals={name: one.as_json() for name, one in results.items()})
    return 0 if all(one.ready for one in results.values()) else 1


def status(
    screen: Console,
    job: Annotated[str | None, typer.Argument(metavar="ID", help="id of a job (default: all jobs)")] = None,
    *,
    kit: options.Kit,
    watch: Annotated[bool, typer.Option("--watch", help="show the job's rounds until the job ends")] = False,
    require: Annotated[
        str | None, option("A,B", "for monitoring: exit with code 1 unless all these hospitals are connected")
    ] = None,
) -> int:
    """Show the connected hospitals and the jobs. With --watch, show the rounds of one job until it ends.

    For each hospital, the command shows its last message and its current round. Then it lists the latest 20 jobs with
    id and state, and explains why a submitted job waits. With --watch, the command also follows a study that a restart
    continues in another job, and its exit code is 0 only if the study finished. Ctrl-C ends the command, but not the
    job.
    """
    if watch and job is None:
        raise MedsiloError("which job? give the id that submit printed; 'medsilo status' lists the latest jobs")
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
    from medsilo.runs.ends import COMPLETED
    from medsilo_lab.consortium import lead

    screen.in_lines = True
    told, at = Moment(), time.monotonic()
    progress = StudyProgress((), 0, "score", look=lambda: replace(told, age=time.monotonic() - at))
    screen.answer(job=job)

    def stands(study: "Progress") -> None:
        nonlocal told, at
        progress.planned, progress.metric = study.planned, study.metric
        told, at = Moment(study.turns, away=study.away), time.monotonic()

    try:
        with screen.rounds(progress) as on_round:
            job, ended = lead.watch(job, kit, lambda line, study: on_round(line), screen.say, stands)
    except KeyboardInterrupt:
        screen.warn(f"no longer watching; the job goes on (to end it: medsilo cancel {job} --kit {kit})")
        return 130
    screen.say(f"{ended}; results: medsilo download {job} --kit {kit}")
    screen.answer(job=job, status=ended)
    if ended == COMPLETED:
        return 0
    screen.say(f"to go on from the last finished round: medsilo resume {job} --kit {kit}")
    return 1


def cancel(screen: Console, job: options.JobId, *, kit: options.Kit) -> None:
    """Stop a job, and wait until it has ended.

    Finished rounds are kept, and 'medsilo resume' continues after them.
    """
    _connecting(screen, kit)
    from medsilo_lab.consortium import lead

    ended = lead.cancel(job, kit, screen.warn)
    screen.say(ended)
    screen.answer(job=job, status=ended)


def download(screen: Console, job: options.JobId, *, kit: options.Kit, out: options.OutFolder = Path("runs")) -> None:
    """Download the results of a job and write its report.

    The results are scores, rounds and shared models of an ended job. Each hospital's personal model stays at that
    hospital.
    """
    _connecting(screen, kit)
    from medsilo_lab.consortium import lead

    conclude(screen, lead.download(job, kit, out))


SUBMIT = Command(
    submit,
    'jobs/fedbn --kit kits/lead@clinic.example --set "participation.sites=[st-anna,university-clinic]"',
    "For a consortium's lead",
)
CANARY = Command(canary, "--kit kits/lead@clinic.example", "For a consortium's lead")
STATUS = Command(status, "--kit KIT", "For a consortium's lead")
CANCEL = Command(cancel, "ID --kit KIT", "For a consortium's lead")
DOWNLOAD = Command(download, "ID --kit KIT", "For a consortium's lead")
