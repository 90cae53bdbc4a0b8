"""Prevent one comparison from replacing another comparison's finished runs in the same folder."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from medsilo.core.errors import MedsiloError
from medsilo.core.files import write_json
from medsilo.core.package import in_words, name_that_differs
from medsilo.core.section import Section
from medsilo.core.text import counted
from medsilo.plan import keys_of
from medsilo.runs import paths
from medsilo.runs.reading import read_provenance
from medsilo.site.settings import EachSites, SiteSettings
from medsilo_lab.study.cells import ANOTHER_FOLDER, Cell, differences
from medsilo_lab.study.verdict_file import read_verdict

# Settings that may change the speed or the start of a run, but never the result of a run.
WITHOUT_EFFECT = {"memory_limit", "studies", "approval", "output", "answers"}
MOST_NAMES = 3


class ComparisonFacts(Section):
    """The contents of comparison.json: the settings that are the same for all runs in the folder."""

    settings: dict[str, Any]


def begin(folder: Path, cells: Sequence[Cell], settings: SiteSettings) -> None:
    """Prepare the folder for a comparison; raise MedsiloError if the folder contains runs of another comparison."""
    check_free(folder)
    for problem in (*_other_runs(folder, cells), *_other_rows(folder, cells), *_other_settings(folder, settings)):
        raise MedsiloError(f"{folder.name} holds {problem}; {ANOTHER_FOLDER}", str(folder))
    write_json(folder / paths.COMPARISON, ComparisonFacts(settings=_by_key(settings)).model_dump())


def beside(folder: Path) -> Path:
    """Return the path if nothing exists there. If something exists there, return the path with a number at its end: the
    smallest number for which nothing exists.
    """
    number, free = 1, folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def check_free(folder: Path) -> None:
    """Raise MedsiloError unless the folder is new or empty, or contains a comparison."""
    if folder.exists() and not folder.is_dir():
        raise MedsiloError(f"{folder.name} is a file; name a folder with -o", str(folder))
    names = sorted(path.name for path in folder.iterdir() if path.name != paths.LOCKS) if folder.is_dir() else []
    if not names or {paths.COMPARISON, paths.VERDICT} & set(names):
        return
    if paths.PLAN in names:
        raise MedsiloError("--out is the folder of a run; give another folder", str(folder))
    raise MedsiloError(f"{folder.name} holds other files ({_listed(names)}); name a new folder with -o", str(folder))


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:MOST_NAMES], *(["..."] if len(names) > MOST_NAMES else [])])


def _other_runs(folder: Path, cells: Sequence[Cell]) -> Iterator[str]:
    plans = [(cell, found) for cell in cells if (found := cell.differences())]
    if plans:
        cell, found = plans[0]
        yield f"{counted(len(plans), 'run')} of another plan ({cell.folder.name}: {found})"
    others = []
    for cell in filter(Cell.summary, cells):
        there, own = read_provenance(cell.folder).code, cell.plan.code
        if (name := name_that_differs(there, own)) is not None:
            others.append(f"{cell.folder.name}: {name} {in_words(there.get(name))}, now {in_words(own.get(name))}")
    if others:
        yield f"{counted(len(others), 'run')} of another medsilo ({others[0]})"


def _other_rows(folder: Path, cells: Sequence[Cell]) -> Iterator[str]:
    if not (folder / paths.VERDICT).exists():
        return
    names = {cell.folder.name for cell in cells}
    if left_out := [run.run for run in read_verdict(folder).runs if run.run not in names]:
        number, shown = counted(len(left_out), "run"), _listed(left_out)
        yield f"{number} that this comparison leaves out ({shown}): name their rows and seeds too"


def _other_settings(folder: Path, settings: SiteSettings) -> Iterator[str]:
    path = folder / paths.COMPARISON
    there = ComparisonFacts.in_file(path, path.name, ANOTHER_FOLDER).settings if path.exists() else None
    if there is not None and (found := differences(there, _by_key(settings))):
        yield f"runs with other settings ({found})"


def _by_key(settings: SiteSettings) -> dict[str, Any]:
    every = {"": settings, **(settings.sites if isinstance(settings, EachSites) else {})}
    values = {
        site: json.loads(one.model_dump_json(exclude={*WITHOUT_EFFECT, "sites"}, exclude_defaults=True))
        for site, one in every.items()
    }
    return dict(keys_of({**values.pop(""), **values}))
