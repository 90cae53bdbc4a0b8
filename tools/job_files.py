"""Write a job in jobs/ for every method that has no job, and the JSON files of every job from the job's plan.

    python -m tools.job_files

A new job has the plan of jobs/fedavg with the keys of the method, whose comments are the descriptions of the keys. To
change a job, edit the job's file app/config/plan.yaml, which the program never overwrites. Run the program after adding
a method, and after renaming medsilo's controller or executor. The program also writes the file that marks a job without
code.
"""

import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml

from medsilo.core.files import write_json, write_text
from medsilo.flare.job_source import PLAN
from medsilo.flare.jobs import NO_CODE, plan_of
from medsilo.registry import METHODS
from medsilo.schedule.algorithm import Algorithm
from medsilo_lab.jobs import canonical_job

JOBS = Path(__file__).resolve().parents[1] / "jobs"
WIDTH = 120
ALIKE = "All jobs have the same task, training and participation, and differ only in the method."
NO_CODE_TEXT = """\
This job brings no code: it uses the classes of the installed medsilo. NVFlare accepts the classes of a job if the job
has a folder `app/custom`, or if the site's `class_allow_list` names these classes. `medsilo submit` sends a job without
this folder, because some hospitals accept no job with code.
"""


def write(folder: Path) -> None:
    for method in METHODS.ours:
        plan = folder / method / PLAN
        if not METHODS[method].pooled and not plan.exists():
            plan.parent.mkdir(parents=True)
            write_text(plan, first_plan(METHODS[method]))
    for path in sorted(folder.glob(f"*/{PLAN}")):
        job = folder / path.relative_to(folder).parts[0]
        for name, content in canonical_job(plan_of(job)).items():
            write_json(job / name, content)
        write_text(job / NO_CODE, NO_CODE_TEXT)


def first_plan(method: type[Algorithm]) -> str:
    """Return the plan of a method's job; the keys of the method have their default values."""
    idea = " ".join((inspect.getdoc(method) or "").partition("\n\n")[0].split())
    _, _, others = (JOBS / "fedavg" / PLAN).read_text("utf-8").partition("\ntask:\n")
    title = "" if idea.startswith(method.title) else f"{method.title}: "
    return "\n".join([*_comment(f"{title}{idea} {ALIKE}"), "", "algorithm:", *_keys(method), "", "task:", others])


def _keys(method: type[Algorithm]) -> Iterator[str]:
    name = method.model_fields["name"].default
    defaults = method.model_construct(name=name).model_dump(mode="json")
    yield f"  name: {name}"
    for key, field in method.model_fields.items():
        if key in defaults and key not in Algorithm.model_fields:
            yield from _comment(field.description or "", "  ")
            yield from textwrap.indent(yaml.safe_dump({key: defaults[key]}, sort_keys=False), "  ").splitlines()


def _comment(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


if __name__ == "__main__":
    write(JOBS)
