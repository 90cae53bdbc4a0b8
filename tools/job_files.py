"""Write the JSON files of every job in jobs/ from the job's plan, and write the file that marks a job without code.

    python -m tools.job_files [JOBS]

To change a job, edit the job's file app/config/plan.yaml. Run the program after adding a job, or after renaming
medsilo's controller or executor.
"""

import sys
from pathlib import Path

from medsilo.core.files import write_json, write_text
from medsilo.flare.job_source import PLAN
from medsilo.flare.jobs import NO_CODE, plan_of
from medsilo_lab.jobs import canonical_job

JOBS = Path(__file__).resolve().parents[1] / "jobs"
NO_CODE_TEXT = """\
This job brings no code: it uses the classes of the installed medsilo. NVFlare accepts the classes of a job if the job
has a folder `app/custom`, or if the site's `class_allow_list` names these classes. `medsilo submit` sends a job without
this folder, because some hospitals accept no job with code.
"""


def write(folder: Path) -> None:
    for path in sorted(folder.glob(f"*/{PLAN}")):
        job = folder / path.relative_to(folder).parts[0]
        for name, content in canonical_job(plan_of(job)).items():
            write_json(job / name, content)
        write_text(job / NO_CODE, NO_CODE_TEXT)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if sys.argv[1:] else JOBS)
