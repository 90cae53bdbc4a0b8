"""Write jobs/ from the plans in custom/medsilo/jobs: `make jobs`, or write.py FOLDER for another place."""

import shutil
import sys
from pathlib import Path

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_text
from medsilo.flare.job_source import SHIPPED, PlanSource, shipped_plans
from medsilo.flare.jobs import NO_CODE, PLAN, plan_of, write_job

JOBS = Path(__file__).resolve().parent
NO_CODE_TEXT = """\
This job brings no code: it uses the classes of the installed medsilo. NVFlare accepts a job's classes if the job has a
folder `app/custom`, or if the site's `class_allow_list` names them. `medsilo submit` leaves this folder out, because
some hospitals accept no job with code.
"""


def write(folder: Path) -> None:
    """Write all jobs into a folder; those that are there already are replaced."""
    for path in shipped_plans():
        name, plan = path.relative_to(SHIPPED), plan_of(path)
        text = PlanSource.read(path).text(
            f"# Made by 'make jobs' from custom/medsilo/jobs/{name.as_posix()}: change it there, or with --set."
        )
        if name.parent == Path():
            job = folder / path.stem
            shutil.rmtree(job, ignore_errors=True)
            write_job(job, plan)
            write_text(job / PLAN, text)
            write_text(job / NO_CODE, NO_CODE_TEXT)
        else:
            write_text(folder / name.parent / "plans" / name.name, text)


if __name__ == "__main__":
    try:
        write(Path(sys.argv[1]) if sys.argv[1:] else JOBS)
    except MedsiloError as error:
        sys.exit(f"error: {error}")
