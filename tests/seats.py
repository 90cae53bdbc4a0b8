"""Check docs/seats.yaml, the table of medsilo's capabilities with each capability's users and modules.

`python -m tests.seats` writes the table into CONTRIBUTING.md, and lists modules with no capability or two capabilities.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field

from medsilo.cli import all_commands
from medsilo.core.section import Section
from medsilo.plan import Plan
from medsilo.site.settings import SiteSettings
from tools.tables import kinds_of

ROOT = Path(__file__).parents[1]
SOURCE, DOCUMENT = ROOT / "docs/seats.yaml", ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- seats: written by 'python -m tests.seats' -->", "<!-- end of seats -->"
PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "jobs/*.md", "provisioning/**/*.md")
FEW = 3  # a table cell with more keys than this number states only the number of keys


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Seat(_Part):
    capability: str
    serves: str = Field(alias="for")
    missed_by: str = Field(alias="missed by")
    modules: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    hospital: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


class Seats(_Part):
    seats: tuple[Seat, ...]


SEATS = Seats.model_validate(yaml.safe_load(SOURCE.read_text("utf-8")))


# -------------------------------------------------------------------------------------------------------- all parts
@cache
def modules() -> dict[str, Path]:
    custom = ROOT / "custom"
    parts = {path: path.relative_to(custom).with_suffix("").parts for path in sorted(custom.rglob("*.py"))}
    return {".".join(own[:-1] if own[-1] == "__init__" else own): path for path, own in parts.items()}


def keys_of(kind: type[BaseModel], where: str = "") -> Iterator[str]:
    """Yield a section's keys, written as in the option --set."""
    for name, field in kind.model_fields.items():
        inner = [own for own in kinds_of(field.annotation) if isinstance(own, type) and issubclass(own, Section)]
        for section in inner:
            yield from keys_of(section, f"{where}{name}.")
        if not inner:
            yield f"{where}{name}"


def pages() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern))


THINGS: dict[str, Callable[[], list[str]]] = {
    "modules": lambda: list(modules()),
    "plan": lambda: list(dict.fromkeys(keys_of(Plan))),
    "hospital": lambda: list(dict.fromkeys(keys_of(SiteSettings))),
    "commands": lambda: [one.name for group in all_commands().values() for one in group],
    "pages": pages,
}


# ---------------------------------------------------------------------------------------------------- owners
@dataclass(frozen=True)
class Seating:
    taken: dict[str, list[str]]
    problems: list[str]


def seated(kind: str, things: list[str], seats: tuple[Seat, ...] = SEATS.seats) -> Seating:
    """Assign each item to the capability whose matching pattern is longest, not counting stars."""
    patterns = [(pattern, seat.capability) for seat in seats for pattern in getattr(seat, kind)]
    taken: dict[str, list[str]] = {seat.capability: [] for seat in seats}
    problems, used = [], set()
    for thing in things:
        fits = [
            (len(pattern.replace("*", "")), pattern, own) for pattern, own in patterns if fnmatchcase(thing, pattern)
        ]
        best = [(pattern, own) for size, pattern, own in fits if size == max(fits)[0]]
        used |= {pattern for _, pattern, _ in fits}
        if len(best) == 1:
            taken[best[0][1]].append(thing)
        else:
            told = f"two seats, {' and '.join(own for _, own in best)}" if best else "no seat"
            problems.append(f"{kind}: {thing} has {told}; say in {SOURCE.relative_to(ROOT)} whose it is")
    unused = [(pattern, own) for pattern, own in patterns if pattern not in used]
    problems += [f"{kind}: nothing is {pattern!r}, which {own!r} names; take it out" for pattern, own in unused]
    return Seating(taken, problems)


@cache
def all_seated() -> dict[str, Seating]:
    return {kind: seated(kind, things()) for kind, things in THINGS.items()}


def tests_of(seat: Seat) -> list[Path]:
    return sorted({path for pattern in seat.tests for path in (ROOT / "tests").glob(pattern)})


def problems() -> list[str]:
    names = [seat.capability for seat in SEATS.seats]
    return [
        *(problem for seating in all_seated().values() for problem in seating.problems),
        *(f"tests: no file is {pattern!r}" for pattern in _without_files()),
        *(f"{name}: two seats have this name" for name in sorted({name for name in names if names.count(name) > 1})),
    ]


def _without_files() -> list[str]:
    patterns = [pattern for seat in SEATS.seats for pattern in seat.tests]
    return [pattern for pattern in patterns if not any((ROOT / "tests").glob(pattern))]


# ---------------------------------------------------------------------------------------------------- the table
def table() -> str:
    rows = [
        "| capability | for whom | who would miss it | where | keys | commands | pages |",
        "|---|---|---|---|---|---|---|",
    ]
    taken = {kind: seating.taken for kind, seating in all_seated().items()}
    for seat in SEATS.seats:
        own = {kind: found[seat.capability] for kind, found in taken.items()}
        cells = [
            *(seat.capability, seat.serves, seat.missed_by or "nobody who is known"),
            _names(seat.modules),
            _few([*own["plan"], *own["hospital"]]),
            _names(own["commands"]),
            _few(own["pages"]),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _names(names: tuple[str, ...] | list[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


def _few(names: list[str]) -> str:
    return _names(names) if len(names) <= FEW else f"{len(names)}"


def document() -> str:
    before, begins, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    assert begins, f"CONTRIBUTING.md has no {BEGIN}"
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    wrong = problems()
    print(*wrong, sep="\n", file=sys.stderr)
    if not wrong:
        DOCUMENT.write_text(document(), "utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
