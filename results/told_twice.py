"""Compute the declared contrasts twice from the same stored scores, by the statistics of an earlier commit and by
today's statistics, and compare the results.

    python -m results.told_twice [--write]

The program extracts the earlier commit's package from this repository and lets the package analyse results/scores in a
separate process. The program prints the result file; with --write, the program also writes this file. The program
trains no model.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from medsilo_lab.study.evidence import Scores
from medsilo_lab.study.verdict_file import PairedDifference
from results import contrasts, result_files
from results.result_files import MEAN, Table

FILE = result_files.FOLDER / "told-twice.csv"
# the commit of 28 November 2026; its statistics add one completely failed patient to each hospital and repetition
COMMIT = "f75bc97e"
JOINING = ("fedavg", "local")
# The program that runs with the earlier package reads one line of JSON and prints one line of JSON.
ASKED = """
import json, sys
import numpy as np
from medsilo_lab.study.evidence import Scores, compare, seeds_of
from medsilo_lab.study.training_luck import luck_of
from medsilo_lab.study.verdict import _tested

def study(own):
    return [{site: Scores(np.array(v), np.array(p)) for site, (v, p) in seed.items()} for seed in own]

asked = json.load(sys.stdin)
scores, found = {name: study(own) for name, own in asked["scores"].items()}, {}
for base in dict.fromkeys(other for _, other in asked["pairs"]):
    rows = [base, *(one for one, other in asked["pairs"] if other == base)]
    names = sorted(scores[base][0])
    levels = np.array([seeds_of(scores[row], names) for row in rows])
    lucks = luck_of(levels, 0) if len(rows) > 2 else [None] * len(rows)
    for row, luck in zip(rows[1:], lucks[1:]):
        found[row, base] = compare(scores[row], scores[base], names, luck=luck)
of = asked["joining"]
there = sorted(scores[of[0]][0]) if of else []
sites = _tested({site: compare(*(scores[one] for one in of), [site]) for site in there})
told = {tuple(key): _tested(found)[tuple(key)] for key in asked["pairs"]}
told |= {(site, ""): one for site, one in sites.items()}
print(json.dumps([[*key, one.as_json()] for key, one in told.items()]))
"""


def package(commit: str, folder: Path) -> Path:
    command = ["git", "archive", commit, "custom"]
    found = subprocess.run(command, cwd=result_files.FOLDER.parent, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "custom"


def as_json(study: Any) -> list[dict[str, list[list[float]]]]:
    def both(own: Scores) -> list[list[float]]:
        return [own.values.tolist(), own.patients.tolist()]

    return [{site: both(own) for site, own in seed.items()} for seed in study]


def earlier() -> list[contrasts.Answers]:
    """Return the data sets that were declared first, because the earlier program knows no others."""
    return [one for one in contrasts.answers() if "declared" not in contrasts.declaration().sets[one.name]]


def told_before(one: contrasts.Answers, code: Path) -> list[tuple[str, str, PairedDifference]]:
    """Return a set's contrasts, and FedAvg's difference at each hospital, as computed by the earlier package."""
    joining = [*JOINING] if {*JOINING} <= {*one.kept.scores} else []
    asked = {
        "scores": {name: as_json(own) for name, own in one.kept.scores.items()},
        "pairs": [*map(list, one.found)],
        "joining": joining,
    }
    found = subprocess.run(
        [sys.executable, "-c", ASKED],
        input=json.dumps(asked).encode(),
        env={**os.environ, "PYTHONPATH": str(code)},
        capture_output=True,
        check=True,
    )
    return [(name, base, PairedDifference.model_validate(own)) for name, base, own in json.loads(found.stdout)]


def tables() -> Iterator[Table]:
    with TemporaryDirectory() as folder:
        code = package(COMMIT, Path(folder))
        for one in earlier():
            seeds = str(len(one.kept.seeds))
            people = {site: own.people for site, own in next(iter(one.kept.scores.values()))[0].items()}
            for name, base, own in told_before(one, code):
                where = MEAN if base else name
                row = (JOINING[0] if not base else name, contrasts.difference_of(own))
                patients = {where: people.get(name, one.patients)} if not base else {MEAN: one.patients}
                yield Table(("", where), [row], one.name, base or JOINING[1], seeds=seeds, patients=patients)


def text() -> str:
    header = {
        "title": "Declared contrasts by the statistics of before 29 November 2026",
        "data": "those of contrasts.csv",
        "command": "python -m results.told_twice --write",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "about": f"The kept scores of results/scores, and the statistics as they were in commit {COMMIT}: one patient "
        "who fails wholly was added to each hospital and each repetition. It is kept to be read beside contrasts.csv; "
        "no page concludes anything from it.",
    }
    return result_files.Study(header, list(tables())).text()


if __name__ == "__main__":
    result_files.print_or_write(FILE, text())
