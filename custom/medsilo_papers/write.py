"""One analysis of some runs, written into a folder."""

import dataclasses
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from medsilo.extend import seed_for, write_json
from medsilo_papers import KINDS
from medsilo_papers.analysis import Question, read_finished
from medsilo_papers.figures import save


def analyse(kind: str, folders: Sequence[Path], asked: Question, out: Path) -> tuple[list[Path], Sequence[str]]:
    """Write <kind>.json and the figures; returns where they are, and what came out in a few lines."""
    module, function = KINDS[kind]
    runs = read_finished(folders)
    for run in runs if asked.network else ():
        run.check_network(str(asked.network))
    work = getattr(import_module(f"medsilo_papers.{module}"), function)
    with asked.settings.compute().reproducible(seed_for(asked.seed, kind)):
        finding = work(runs, asked)
    options = {key: value for key, value in dataclasses.asdict(asked).items() if key != "settings"}
    data = {"kind": kind, "asked": options, "runs": [run.facts() for run in runs], **finding.data}
    write_json(out / f"{kind}.json", data)
    figures = [save(figure, out / f"{name}.png") for name, figure in finding.figures.items()]
    return [*figures, out / f"{kind}.json"], finding.lines
