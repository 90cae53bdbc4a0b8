"""The plans of the jobs that come with medsilo, as they were written: in `medsilo/jobs`.

A plan may name another as its `base` and then says what is different, key by key; comments above it and behind values
come along. `_name.yaml` is a base only. `method.yaml` is the plan of a method's job, `method/name.yaml` a further one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from medsilo.core.errors import MedsiloError
from medsilo.core.yaml_text import load_yaml
from medsilo.plan import Plan

SHIPPED = Path(__file__).resolve().parents[1] / "jobs"


@dataclass
class PlanEntry:
    """A key as it was written: with its value, or with the entries below it."""

    text: str
    comment: str
    below: dict[str, "PlanEntry"] = field(default_factory=dict)

    def rows(self, depth: int = 0) -> list[tuple[str, str]]:
        """Return its lines and those below it, each with its comment."""
        own = ("  " * depth + self.text, self.comment)
        return [own, *(row for entry in self.below.values() for row in entry.rows(depth + 1))]


@dataclass
class PlanSource:
    """A plan as it was written, with what its bases say."""

    header: list[str]
    entries: dict[str, PlanEntry]

    @classmethod
    def read(cls, path: Path) -> "PlanSource":
        """Read a plan and its bases."""
        lines = path.read_text(encoding="utf-8").splitlines()
        body = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
        if hidden := [line for line in lines[body:] if line.lstrip().startswith("#")]:
            raise MedsiloError(f"{path.name}: write the comment {hidden[0].strip()!r} above the plan or behind a value")
        plan = yaml.compose("\n".join(lines))
        assert isinstance(plan, yaml.MappingNode)
        own = cls([line for line in lines[:body] if line], _entries(plan, lines))
        base = own.entries.pop("base", None)
        if base is None:
            return own
        below = cls.read(path.parent / base.text.removeprefix("base: "))
        return cls([*own.header, *below.header], _merged(below.entries, own.entries))

    def text(self, *more: str) -> str:
        """Return the whole plan, its sections in a plan's order; comments of a section stand below each other.

        more: comments behind those above the plan.
        """
        lines: list[str] = []
        after_section = True
        known = [key for key in Plan.model_fields if key in self.entries]
        for entry in (self.entries[key] for key in dict.fromkeys([*known, *self.entries])):
            rows = entry.rows()
            width = max((len(text) for text, comment in rows if comment), default=0)
            lines += [""] * (after_section or bool(entry.below))
            lines += [f"{text:{width}}  {comment}" if comment else text for text, comment in rows]
            after_section = bool(entry.below)
        return "\n".join([*self.header, *more, *lines]) + "\n"


def _entries(node: yaml.MappingNode, lines: list[str]) -> dict[str, PlanEntry]:
    entries = {}
    for key, value in node.value:
        has_more = isinstance(value, yaml.MappingNode) and not value.flow_style
        end = key.end_mark if has_more else value.end_mark
        written = [*lines[key.start_mark.line : end.line], lines[end.line][: end.column + has_more]]
        text = "\n".join([written[0][key.start_mark.column :], *written[1:]])
        comment = lines[end.line][end.column + has_more :].strip()
        entries[key.value] = PlanEntry(text, comment, _entries(value, lines) if has_more else {})
    return entries


def _merged(base: dict[str, PlanEntry], own: dict[str, PlanEntry]) -> dict[str, PlanEntry]:
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


def shipped_jobs() -> list[str]:
    """Return the names of the methods that have a job."""
    return sorted(path.stem for path in SHIPPED.glob("[!_]*.yaml"))


def shipped_plans() -> Iterator[Path]:
    """Yield the plans of all jobs, each at its place in `SHIPPED`; further ones come last."""
    yield from sorted(SHIPPED.glob("[!_]*.yaml"))
    yield from sorted(SHIPPED.glob("*/[!_]*.yaml"))


def shipped(job: Path) -> Path | None:
    """Return the plan that a job's name stands for, such as `fedavg`, `jobs/fedavg` or `fedsm/prostate`."""
    parts = job.parts[1:] if job.parts[:1] == ("jobs",) else job.parts
    return next((path for path in shipped_plans() if path.relative_to(SHIPPED).with_suffix("").parts == parts), None)


def values_of(plan: Path) -> object:
    """Return a shipped plan with what its bases say, as it is read from YAML."""
    return load_yaml(PlanSource.read(plan).text())
