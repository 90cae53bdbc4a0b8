"""Say what lies in a folder, what suits it, and what to do next: the first looker that knows the folder does.

The choices are written as a hospital's medsilo.yaml and a job with its plan, each key with its reason as a comment.
"""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.core.files import dump_yaml, load_yaml, write_text
from medsilo.flare.jobs import PLAN, write_job
from medsilo.plan import Plan, parse_plan
from medsilo.registry import LOOKERS
from medsilo.site.settings import FILE_NAME, make_settings
from medsilo.start.choices import Choice, Draft, choose
from medsilo.start.fitting import Machine
from medsilo.start.folder_layout import layout_of_folder
from medsilo.start.looks import look_at


@dataclass(frozen=True)
class Sight:
    """Findings, one sentence a line, and the choices that follow.

    >>> Sight(["40 photographs"], several=False, choices=None).found
    ['40 photographs']
    """

    found: list[str]
    several: bool  # whether the folder has several hospitals
    choices: Draft


@dataclass(frozen=True)
class Folder:
    """A folder that `medsilo init` is to look at.

    >>> from pathlib import Path
    >>> Folder(Path("/data/kidney"), "st-anna", lambda: None, "cpu").site
    'st-anna'
    """

    path: Path
    site: str  # this hospital's name, where the folder is one hospital's
    machine: Callable[[], Machine]
    device: str | None  # one that was asked for


def first_sight(folder: Folder) -> Sight:
    """Open some of a folder's files, and choose; a folder that no entry point `medsilo.lookers` knows has images."""
    for name in LOOKERS:
        if (sight := LOOKERS[name](folder)) is not None:
            return sight
    return look(folder)


def look(folder: Folder) -> Sight:
    """Say what suits a folder of images; a DataError says what is missing in it."""
    looks = look_at(folder.path, layout_of_folder(folder.path))
    choices = choose(looks, looks.layout.hospitals or (folder.site,), folder.machine(), folder.device)
    return Sight(looks.found, bool(looks.layout.hospitals), choices)


SHOWN = (
    "task.signals",
    "task.rate",
    "task.window",
    "task.size",
    "task.target_spacing",
    "task.intensity",
    "network.name",
    "training.batch_size",
    "data.patient",
)


def shown_lines(choices: Draft) -> list[str]:
    """Return the choices that people ask about first, one line each."""
    own = [choice for choice in (*choices.plan, *choices.settings) if choice.key in SHOWN]
    return [f"{choice.key}: {in_yaml(choice.value)}  ({choice.why})" for choice in own]


def rows(choices: Draft) -> list[tuple[str, str, str, str]]:
    """Return the choices as file, key, value and reason."""
    files = [(f"{JOB}/app/config/plan.yaml", choices.plan), (FILE_NAME, choices.settings)]
    files += [(f"{site}/{FILE_NAME}", own) for site, own in choices.sites.items()]
    return [(file, choice.key, in_yaml(choice.value), choice.why) for file, own in files for choice in own]


def advice(several: bool, out: Path, stopped: Sequence[str], minutes: int) -> list[tuple[str, str]]:
    """Return what to do next: what for, and the command, if there is one.

    several: whether the folder has all hospitals; stopped: those of which the check found what stops the study;
    minutes: of a comparison.
    """
    job = out / JOB
    given = f"--settings {out}"
    steps = [(f"read the reasons in {out / FILE_NAME} and {job}/app/config/plan.yaml, and correct what is wrong", "")]
    if stopped:
        command = f"medsilo check {job} --settings {place_of(out, stopped[0])} --site {stopped[0]}"
        return [(f"settle what the check found at {', '.join(stopped)}, then check again:", command), *steps]
    counted = f"medsilo statistics {job} {given} -o {out / 'cases'}"
    if several:
        steps.append(("how many patients each hospital has of each class, and how many an interval needs:", counted))
        command = f"medsilo compare --plan {job} --methods local,fedavg --minutes {minutes} {given}"
        return [*steps, ("does joining pay for these hospitals?", command)]
    return [
        *steps,
        ("train on this machine alone:", f"medsilo run {job} --set algorithm.name=local {given} --engine inprocess"),
        (f"with others: send {job} to the consortium's lead, and put {out / FILE_NAME} into your kit's local/", ""),
    ]


JOB, TRIAL, CHECKS = "job", "trial", "check"
WIDTH = 118
OF_PLAN = (
    "What all hospitals agree on, drafted by 'medsilo init' from one folder: read it, and change what you know better.",
    "docs/plan.md has every key, docs/your-data.md those of the task.",
)
OF_SETTINGS = (
    "What only this hospital decides, drafted by 'medsilo init'. No job and no plan can change it.",
    "Put it into your kit's local/ folder. site_configs/example/medsilo.yaml has every other key.",
)


def refuse_to_overwrite(out: Path, folder: Path) -> None:
    """Raise an error where something of a start is in the way, or where the output would lie among the data."""
    there = [name for name in (FILE_NAME, JOB, TRIAL, CHECKS) if (out / name).exists()]
    if there:
        raise MedsiloError(
            f"{out / there[0]} exists and stays as it is; choose another folder with --out, or remove it"
        )
    if out.resolve().is_relative_to(folder.resolve()):
        raise MedsiloError(
            f"--out {out} lies in the data folder, where nothing is written; give another, like -o ../{out.name}"
        )


def write_start(out: Path, choices: Draft) -> Plan:
    """Write medsilo.yaml, also those of single hospitals, and the job; return its plan. All is checked before."""
    text = text_of(OF_PLAN, choices.plan)
    plan = parse_plan(load_yaml(text))
    texts = {FILE_NAME: text_of(OF_SETTINGS, choices.settings)}
    texts |= {f"{site}/{FILE_NAME}": text_of(OF_SETTINGS, choices.settings_of(site)) for site in choices.sites}
    for name, own in texts.items():
        make_settings(load_yaml(own), name)
    write_job(out / JOB, plan)
    write_text(out / JOB / PLAN, text)
    for name, own in texts.items():
        write_text(out / name, own)
    return plan


def place_of(out: Path, site: str) -> Path:
    """Return the folder with a hospital's settings: its own, or that of all."""
    return out / site if (out / site / FILE_NAME).exists() else out


def text_of(head: Sequence[str], choices: Sequence[Choice]) -> str:
    """Return a file of YAML with the reasons of its choices."""
    lines = [f"# {line}" for line in head]
    for section, own in groupby(choices, key=lambda choice: choice.key.rpartition(".")[0]):
        lines += ["", *([f"{section}:"] if section else [])]
        lines += _rows([(choice.key.rpartition(".")[2], choice) for choice in own], "  " if section else "")
    return "\n".join(lines) + "\n"


def _rows(choices: Sequence[tuple[str, Choice]], indent: str) -> list[str]:
    """Return a section's lines; a reason is behind its key, or above it where both are too long for a line."""
    texts = [(f"{indent}{key}: {in_yaml(choice.value)}", choice.why) for key, choice in choices]
    width = max((len(text) for text, why in texts if len(text) + len(why) + 4 <= WIDTH), default=0)
    lines: list[str] = []
    for text, why in texts:
        beside = f"{text:{width}}  # {why}" if why else text
        if len(beside) <= WIDTH:
            lines.append(beside)
        else:
            lines += [*(f"{indent}# {line}" for line in textwrap.wrap(why, WIDTH - len(indent) - 2)), text]
    return lines


def in_yaml(value: Any) -> str:
    """Return a value in one line of YAML."""
    return dump_yaml([value], in_line=True)[1:-2]  # within a list, where it needs quotes also for a comma
