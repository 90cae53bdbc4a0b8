"""The commands check, ledger, logs and prune for a hospital's engineer."""

from contextlib import suppress
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from medsilo.cli import options
from medsilo.cli.options import option
from medsilo.cli.show import Console
from medsilo.core.errors import MedsiloError

if TYPE_CHECKING:
    from medsilo.check.site_check import Visit
    from medsilo.site.ledger import Ledger


def check(
    screen: Console,
    job: options.JobOrNone = None,
    *,
    plan: options.PlanFile = None,
    changes: options.Changes,
    kit: options.SiteKit = None,
    settings_folder: options.SettingsFolder = None,
    data: Annotated[
        Path | None, option("FOLDER", "a data folder to use instead of the folder that the settings name")
    ] = None,
    site: Annotated[str | None, option("SITE", "this site's name in the job (default: the name in the kit)")] = None,
    private: Annotated[
        Path,
        option(
            "FILE",
            "output file for the names of faulty files and patients; never send it to anyone",
            parser=options.output_file,
        ),
    ] = Path("medsilo-check-private.txt"),
    accept: Annotated[
        bool,
        typer.Option("--accept", help="accept the kit's local/ and events.log as they are now"),
    ] = False,
) -> int:
    """Check a hospital's machine, kit and data before it joins a study.

    The check sends no data. You may mail its output, because it names no patients and no files (medsilo docs
    study/join). The exit code is 0 if the hospital can join, 1 if it can't, and 2 for a wrong command line.
    """
    import sys

    try:
        options.check_changes(changes, job, plan)
    except MedsiloError as error:
        return screen.fail(error, 2)
    if job or plan:
        screen.note("loading PyTorch")
    from medsilo.check.site_check import check

    try:
        visit = _visit(job, plan, changes, kit, settings_folder, data, site, accept)
    except MedsiloError as error:
        return screen.fail(error, 2)
    found = check(visit, lambda line: print(f"{line} ...", file=sys.stderr, flush=True))
    kept = found.write_private(private)
    screen.say(text := found.as_text())
    if kit and "--kit KIT" in text:  # the report must not contain the path of the kit, because the path is private
        print(f"KIT is {kit} here", file=sys.stderr)
    if kept:
        print(f"names of files and patients, for this hospital only: {private}", file=sys.stderr)
    screen.answer(**found.as_json())
    return 0 if found.go else 1


def ledger(
    screen: Console,
    action: Annotated[
        Literal["show", "accept"], typer.Argument(metavar="ACTION", case_sensitive=False, help="show or accept")
    ] = "show",
    *,
    kit: Annotated[Path, option("KIT", options.SITES_KIT)],
    old_kit: Annotated[Path | None, option("KIT", "for accept: the previous kit, whose key signed the ledger")] = None,
) -> None:
    """Show the privacy cost of all studies at this hospital, and the number of answers that it sent.

    'ledger show' verifies all lines and signatures of the ledger. Then it prints the ε of each data set and study, and
    the number of answers that this hospital sent. For a training script, it also prints the largest number of bits that
    the script's messages could contain. After you replace the kit or restore a copy of the ledger, 'ledger accept'
    signs the ledger with the key of the current kit.
    """
    screen.note("reading the ledger")
    from medsilo.check.hospital_checks import KitAtHome
    from medsilo.check.spending import answer_lines, answered, spending_lines, spent
    from medsilo.site.ledger import ledgers

    if old_kit and action != "accept":
        raise MedsiloError("the option --old-kit is for 'ledger accept' only")
    home = KitAtHome.read(kit)
    folder = home.budget.folder
    found = [home.ledger(data) for data in ledgers(folder, home.files.kit)]
    if not found and action == "accept":
        raise MedsiloError(
            "this hospital has no ledger yet; it begins with the first study that has differential privacy or a "
            "training script",
            str(folder),
        )
    if not found:
        screen.say("no study has cost anything yet: the ledger begins with the first one that is counted")
    if action == "accept":
        _accept_ledgers(screen, found, old_kit)
        if not home.accepted.file.exists():
            home.accepted.accept(home.settings)
            screen.say("local/ is accepted as it is now")
        return
    # `spent` also verifies each line of the ledger
    told = [spent(one, home.settings.privacy) for one in found]
    for view in told:
        screen.say(*spending_lines(view))
    answers = answered(home.budget)
    screen.say(*answer_lines(answers))
    screen.answer(ledgers=told, answers=answers)


def prune(
    screen: Console,
    folder: Annotated[
        Path,
        typer.Argument(
            help="a folder of runs, or the kit of a server or a hospital (default: the folder runs)", show_default=False
        ),
    ] = Path("runs"),
    *,
    older_than: Annotated[
        float, option("DAYS", "only files and folders that have not changed for this many days", min=0)
    ] = 7.0,
    unfinished: Annotated[
        float | None,
        option("DAYS", "also checkpoints of unfinished studies that have not changed for this many days", min=0),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="remove the listed files and folders")] = False,
) -> None:
    """List files that old runs no longer need, with sizes and ages; with --yes, remove these files.

    The list contains checkpoints of finished studies, and incomplete files. For a kit, it also contains folders of
    jobs, and for the server's kit, jobs that have ended. The command never removes models, scores and reports. Results
    that a lead has not yet downloaded stay in the folder medsilo/ of the server's kit.
    """
    screen.note(f"looking through {folder}")
    from medsilo.runs.clean import check_holds_runs, find_old, remove

    asked = folder, older_than, inf if unfinished is None else unfinished
    if (folder / "startup").is_dir():
        from medsilo.flare.leftovers import find_in_kit

        old = find_in_kit(*asked)
    else:
        check_holds_runs(folder)
        old = find_old(*asked)
    screen.say(*(f"{one.bytes:>14,} bytes {one.days:>5.0f} days  {one.path}  {one.why}" for one in old))
    total = f"{len(old)}, {sum(one.bytes for one in old):,} bytes"
    if yes:
        remove(old)
        screen.say(f"files and folders removed: {total}")
    else:
        screen.say(f"files and folders that may go: {total}" + ("; with --yes they are removed" if old else ""))
    screen.answer(files=[asdict(one) for one in old], removed=yes)


def logs(
    screen: Console,
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="a job's id or a study's name (default: all jobs)")
    ] = None,
    *,
    kit: Annotated[Path, option("KIT", "the kit of a server or of a hospital, on its own machine")],
    follow: Annotated[bool, typer.Option("--follow", help="also show new events until Ctrl-C")] = False,
) -> None:
    """Show the events of a server or a hospital: connections, and why and when studies began and ended.

    A line with WARNING needs a person's attention. The command reads the events from the file events.log in the kit.
    """
    from medsilo.check.kit import read_kit
    from medsilo.runs import event_reading

    party = read_kit(kit).party
    if party not in ("server", "hospital"):
        raise MedsiloError(f"the kit of a {party} has no events; give the kit of a server or of a hospital")
    found = [event_reading.shown(line) for line in event_reading.read(kit, job or "")]
    screen.say(*found or ["nothing has happened yet"])
    screen.answer(events=found)
    with suppress(KeyboardInterrupt):
        for line in event_reading.follow(kit, job or "") if follow else ():
            screen.say(event_reading.shown(line))


def _accept_ledgers(screen: Console, ledgers: "list[Ledger]", old_kit: Path | None) -> None:
    from medsilo.check.hospital_checks import files_of
    from medsilo.check.kit import read_kit

    old = files_of(read_kit(old_kit)).key_for("ledger") if old_kit else None
    for ledger in ledgers:
        known = ledger.accept(old)
        told = "" if known else "; the key before it did not sign that: it is not in --old-kit"
        screen.say(f"data set {ledger.data}: the kit's key signs from here on{told}")


def _visit(
    job_name: str | None,
    plan_file: Path | None,
    changes: list[str],
    kit_folder: Path | None,
    settings_folder: Path | None,
    data: Path | None,
    site: str | None,
    accept: bool,
) -> "Visit":
    """Convert the command line of 'medsilo check' to a Visit, and raise a MedsiloError for a wrong command line."""
    from medsilo.check.kit import read_kit
    from medsilo.check.site_check import Visit
    from medsilo.core.text import is_safe_name
    from medsilo.site.settings import SiteSettings
    from medsilo.tasks.sources import DataSource

    if accept and not kit_folder:
        raise MedsiloError("--accept needs a kit; give --kit")
    kit = read_kit(kit_folder) if kit_folder else None
    local = options.folder_of_settings(settings_folder, kit_folder)
    own = options.folder_of_site(local, site) if site else local
    plan, allowed, scope, code = None, tuple[str, ...](), None, None
    with suppress(MedsiloError):  # `medsilo check` itself reports errors in the settings
        allowed = SiteSettings.read(own).packages if own else ()
    if job_name:
        from medsilo.flare.job_source import find_job
        from medsilo.flare.jobs import code_of, plan_of, scope_of

        job = find_job(job_name)
        plan = plan_of(job, changes, plan_file, allowed)
        scope, code = scope_of(job), code_of(job, plan)
    elif plan_file:
        from medsilo.plan import load_plan

        plan = load_plan(plan_file, changes, allowed)
    elif changes:
        raise MedsiloError("--set changes a plan, but no plan was given; give a job or --plan")
    site = site or (kit.name if kit else None)
    if site is None and plan and plan.participation.everyone:
        known = ", ".join(plan.participation.everyone)
        raise MedsiloError(f"the name of this site is not known; give --site with a name of the job: {known}")
    site = site or "this-site"
    if not is_safe_name(site):
        raise MedsiloError(f"--site {site!r} has odd characters; use letters, digits, '.', '_' and '-'")
    local = options.folder_of_site(local, site)
    source = DataSource(folder=data) if data else None
    return Visit(site, plan, scope, code, local, kit, source, accept=accept)
