"""The command for who reviews medsilo at a hospital: evidence."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.cli import options
from medsilo.cli.show import Screen


def evidence(
    screen: Screen,
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            help="jobs whose leak reports go in (default: all in ./jobs)", autocompletion=options.complete_job
        ),
    ] = None,
    *,
    out: Annotated[
        Path,
        typer.Option(*options.OUT, metavar="FOLDER", parser=options.output_folder, help="folder for the evidence"),
    ],
    tests: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="JUnit results of this build's tests, as often as wanted (default: build/tests/*.xml)",
        ),
    ] = None,
) -> int:
    """Write what a hospital's data protection officer asks for: claims with the tests that show them, packages, flows.

    index.html has a table in which every "yes" links to a test that ran and passed on this build; beside it lie the
    list of packages (SBOM), leak reports and all results of tests. Ends with 1 if a claim is not shown.
    """
    screen.note("reading the jobs")
    from medsilo.flare.jobs import JOBS, PLAN, find_job, plan_of
    from medsilo.review.evidence_folder import PAGE, write_evidence
    from medsilo.review.installed import SBOM, write_sbom

    shipped = sorted(path.relative_to(JOBS).parts[0] for path in JOBS.glob(f"*/{PLAN}"))
    folders = {Path(job).name: find_job(job) for job in jobs or shipped}
    plans = {name: plan_of(folder) for name, folder in folders.items()}
    reports = tests or sorted(Path("build/tests").glob("*.xml"))
    out.mkdir(parents=True, exist_ok=True)
    with screen.busy("gathering"):
        write_sbom(out / SBOM)
        verdicts = write_evidence(out, plans, reports)
    shown = sum(verdict.shown for verdict in verdicts)
    screen.say(f"{shown} of {len(verdicts)} claims are shown by tests of this build")
    if not reports:
        screen.warn("no results of tests were given, so no claim is shown: make test writes build/tests/test.xml")
    screen.say(f"evidence: {out / PAGE}")
    screen.answer(page=out / PAGE, claims=len(verdicts), shown=shown)
    return 0 if shown == len(verdicts) else 1
