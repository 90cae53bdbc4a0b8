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
) -> int:
    """Write what a hospital's data protection officer asks for: packages, leak reports, and what travels.

    index.html shows who sends what to whom, and what is installed; beside it lie the leak reports and the list of
    packages (SBOM). docs/review.md has the claims about medsilo, and the tests that show them.
    """
    screen.note("reading the jobs")
    from medsilo.flare.jobs import JOBS, PLAN, find_job, plan_of
    from medsilo.review import SBOM, write_evidence, write_sbom

    shipped = sorted(path.relative_to(JOBS).parts[0] for path in JOBS.glob(f"*/{PLAN}"))
    folders = {Path(job).name: find_job(job) for job in jobs or shipped}
    plans = {name: plan_of(folder) for name, folder in folders.items()}
    out.mkdir(parents=True, exist_ok=True)
    with screen.busy("gathering"):
        write_sbom(out / SBOM)
        page = write_evidence(out, plans)
    screen.say(f"evidence: {page}")
    screen.answer(page=page, jobs=list(plans))
    return 0
