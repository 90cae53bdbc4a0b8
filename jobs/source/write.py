"""Write jobs/ from the plans in this folder: `make jobs`, or write.py FOLDER for another place.

A plan may name another as its `base` and then says what is different, key by key; comments above it and behind values
come along. `_name.yaml` is a base only. `method.yaml` becomes jobs/method, `method/name.yaml` its plans/name.yaml.
"""

import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_yaml, write_text
from medsilo.flare.jobs import PLAN, write_job
from medsilo.plan import Plan, parse_plan

SOURCE = Path(__file__).resolve().parent
JOBS = SOURCE.parent


@dataclass
class Entry:
    """A key as it was written: with its value, or with the entries below it."""

    text: str
    comment: str
    below: dict[str, "Entry"] = field(default_factory=dict)

    def rows(self, depth: int = 0) -> list[tuple[str, str]]:
        """Return its lines and those below it, each with its comment."""
        own = ("  " * depth + self.text, self.comment)
        return [own, *(row for entry in self.below.values() for row in entry.rows(depth + 1))]


@dataclass
class Source:
    """A plan as it was written, with what its bases say."""

    header: list[str]
    entries: dict[str, Entry]

    def text(self) -> str:
        """Return the whole plan; comments of a section stand below each other."""
        lines: list[str] = []
        after_section = True
        for entry in self.entries.values():
            rows = entry.rows()
            width = max((len(text) for text, comment in rows if comment), default=0)
            lines += [""] * (after_section or bool(entry.below))
            lines += [f"{text:{width}}  {comment}" if comment else text for text, comment in rows]
            after_section = bool(entry.below)
        return "\n".join([*self.header, *lines]) + "\n"


def read(path: Path) -> Source:
    """Read a plan and its bases."""
    lines = path.read_text(encoding="utf-8").splitlines()
    body = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    if hidden := [line for line in lines[body:] if line.lstrip().startswith("#")]:
        raise MedsiloError(f"{path.name}: write the comment {hidden[0].strip()!r} above the plan or behind a value")
    own = Source([line for line in lines[:body] if line], _entries(yaml.compose("\n".join(lines)), lines))
    base = own.entries.pop("base", None)
    if base is None:
        return own
    below = read(path.parent / base.text.removeprefix("base: "))
    return Source([*own.header, *below.header], _merged(below.entries, own.entries))


def _entries(node: yaml.MappingNode, lines: list[str]) -> dict[str, Entry]:
    entries = {}
    for key, value in node.value:
        has_more = isinstance(value, yaml.MappingNode) and not value.flow_style
        end = key.end_mark if has_more else value.end_mark
        written = [*lines[key.start_mark.line : end.line], lines[end.line][: end.column + has_more]]
        text = "\n".join([written[0][key.start_mark.column :], *written[1:]])
        comment = lines[end.line][end.column + has_more :].strip()
        entries[key.value] = Entry(text, comment, _entries(value, lines) if has_more else {})
    return entries


def _merged(base: dict[str, Entry], own: dict[str, Entry]) -> dict[str, Entry]:
    """Return the base's entries with own ones in their place; a new one stands behind the key that it stood behind."""
    order, place = list(base), 0
    for key in own:
        if key not in base:
            order.insert(place, key)
        place = order.index(key) + 1
    entries = {key: own.get(key) or base[key] for key in sorted(order, key=lambda key: key != "name")}
    for key in own.keys() & base.keys():
        if own[key].below:
            entries[key] = replace(own[key], below=_merged(base[key].below, own[key].below))
    return entries


def _plan(path: Path) -> tuple[Plan, str]:
    """Return the plan that a source becomes, and its text with the sections in a plan's order."""
    name, source = f"jobs/source/{path.relative_to(SOURCE).as_posix()}", read(path)
    made = f"# Made by 'make jobs' from {name}: change it there, or for one run with --set."
    try:
        plan = parse_plan(load_yaml(source.text()))
    except MedsiloError as error:
        raise MedsiloError(f"{name}: {error}") from error
    sections = {key: source.entries[key] for key in Plan.model_fields if key in source.entries}
    return plan, Source([*source.header, made], sections).text()


def write(folder: Path) -> None:
    """Write all jobs into a folder; those that are there already are replaced."""
    plans = {path.relative_to(SOURCE): _plan(path) for path in sorted(SOURCE.rglob("[!_]*.yaml"))}
    for path, (plan, text) in plans.items():
        if path.parent == Path():
            job = folder / path.stem
            shutil.rmtree(job, ignore_errors=True)
            write_job(job, plan)
            write_text(job / PLAN, text)
    for path, (_, text) in plans.items():
        if path.parent != Path():
            write_text(folder / path.parent / "plans" / path.name, text)


if __name__ == "__main__":
    try:
        write(Path(sys.argv[1]) if sys.argv[1:] else JOBS)
    except MedsiloError as error:
        sys.exit(f"error: {error}")
