"""Write the choices: a hospital's medsilo.yaml and a job with its plan, each key with its reason as a comment."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError, YamlError
from medsilo.core.files import load_yaml, write_text
from medsilo.flare.jobs import PLAN, write_job
from medsilo.plan import Plan, parse_plan
from medsilo.site.settings import FILE_NAME, make_settings
from medsilo.start.choices import Choice, Draft

JOB, TRIAL, CHECKS, PAGE = "job", "trial", "check", "start.html"
WIDTH = 118
PLAIN = re.compile(r"[A-Za-z0-9/][A-Za-z0-9_./ *-]*")  # texts that YAML takes without quotes, if it reads them as such
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
    there = [name for name in (FILE_NAME, JOB, TRIAL, CHECKS, PAGE) if (out / name).exists()]
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
    text = plan_text(choices)
    plan = parse_plan(load_yaml(text))
    several = {site: choices.settings_of(site) for site in choices.sites}
    texts = {FILE_NAME: settings_text(choices)}
    texts |= {f"{site}/{FILE_NAME}": _text(OF_SETTINGS, own) for site, own in several.items()}
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


def plan_text(choices: Draft) -> str:
    """Return plan.yaml with its reasons."""
    return _text(OF_PLAN, choices.plan)


def settings_text(choices: Draft) -> str:
    """Return medsilo.yaml with its reasons."""
    return _text(OF_SETTINGS, choices.settings)


def _text(head: Sequence[str], choices: Sequence[Choice]) -> str:
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
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{in_yaml(key)}: {in_yaml(own)}" for key, own in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(in_yaml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        return str(value)
    return value if PLAIN.fullmatch(value) and _as_read(value) == value else "'" + value.replace("'", "''") + "'"


def _as_read(text: str) -> Any:
    """Return what YAML makes of a text without quotes; None where it is none."""
    try:
        return load_yaml(text)
    except YamlError:
        return None
