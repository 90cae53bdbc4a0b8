"""Read the valid keys of a plan from source code, so that a wrong key is reported without loading PyTorch."""

from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError, PlanError, YamlError
from medsilo.core.source_keys import PLAN_CLASS, SourceKeys, keys_in_source
from medsilo.core.wording import unknown_key
from medsilo.core.yaml_text import load_yaml, read_yaml
from medsilo.flare.job_source import YAML, job_or_run, values_of
from medsilo.registry import TABLES

SETTINGS = "medsilo.site.settings:SiteSettings"


def keys_of_plans() -> dict[str, list[str]]:
    """Return the keys of every plan, each with the keys below it; sections that depend on a plan have none."""
    plan = keys_in_source(PLAN_CLASS)
    return {key: [*(within.keys if (within := plan.below([key])) else ())] for key in plan.keys} if plan else {}


def as_written(job: Path | str | None, plan: Path | None) -> dict[str, Any]:
    """Return the unchecked values of a plan; empty if the plan cannot be read."""
    own, other = _values_of(job), _values_of(plan)
    return {**other, "algorithm": own.get("algorithm")} if plan else own


def _values_of(job: Path | str | None) -> dict[str, Any]:
    if job is None:
        return {}
    try:
        found = job_or_run(job) if Path(job).suffix not in YAML else Path(job)
        values = values_of(found, lambda file: read_yaml(file, "the plan", "a plan.yaml"))
    except (MedsiloError, OSError):  # an unreadable plan is reported later, when the plan is loaded
        return {}
    return values if isinstance(values, dict) else {}


def check_keys(changes: Iterable[str], written: Mapping[str, Any]) -> None:
    """Raise a PlanError if a change such as `a.b=value` names a key that no plan has."""
    changes = [*changes]
    names = {section: table.named_in(written.get(section)) for section, table in TABLES.items()}
    for key, _, name in (change.partition("=") for change in changes):
        section, _, last = key.partition(".")
        if section in TABLES and last == "name":
            names[section] = TABLES[section].spelled(name) or name
            # the default network depends on the task, so a new task makes the network unknown
            names |= {"network": ""} if section == "task" else {}
    if wrong := [*filter(None, (_wrong(change, names) for change in changes))]:
        raise PlanError("; ".join(wrong))


def _wrong(change: str, names: Mapping[str, str]) -> str:
    key, equals, text = change.partition("=")
    path = key.split(".")
    known, place = _known_at(path, names)
    try:
        value = load_yaml(text)
    except YamlError:  # an invalid change is reported later, when the plan is loaded
        return ""
    if not place or not equals or not all(path):
        return ""
    sections, settings = keys_of_plans(), keys_in_source(SETTINGS)
    if settings and path[-1] in settings.keys and path[-1] not in sections:
        return f"{key}: each hospital decides this itself, in its medsilo.yaml: write {path[-1]} there (--settings)"
    inner: Any = reduce(lambda below, part: {part: below}, reversed(path[place:]), value)
    return unknown_key(".".join(path[:place]), inner, known, sections)


def _known_at(path: list[str], names: Mapping[str, str]) -> tuple[list[str], int]:
    """Return the valid keys at the place of the path's first unknown key, and the key's position, counted from 1.

    The position is 0 if the path contains no unknown key.
    """
    found = keys_in_source(PLAN_CLASS)
    for place, key in enumerate(path):
        if found is None or not found.keys:
            break
        if key not in found.keys:
            return [*found.keys], place + 1
        found = _within(key, names) if place == 0 and key in TABLES else found.below([key])
    return [], 0


def _within(section: str, names: Mapping[str, str]) -> SourceKeys | None:
    """Return the keys of a plan's method, task or network. If the plan names no network, return the keys of all
    networks.
    """
    table, task = TABLES[section], names.get("task", "")
    if name := names.get(section):
        return keys_in_source(table.written_in(name))
    if section != "network" or task not in TABLES["task"].ours:
        return None
    # networks that wrap another network have no fixed keys (None), so they are left out
    known = [keys_in_source(table.written_in(name)) for name in table.ours]
    return SourceKeys({key: "" for keys in known if keys for key in keys.keys})
