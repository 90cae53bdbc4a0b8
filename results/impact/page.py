"""Create the result file: a table of each estimated quantity, and the answers to the declared questions."""

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np

from medsilo_lab.study.evidence import holm
from results.flamby import Lines
from results.impact import METHODS, POOLED, POOLED_ALL, PRIVATE, TRAINING, Found, deaths
from results.impact.statistics import Estimate, auc, calibration_in_the_large, calibration_slope, mean_of
from results.result_files import LESS, MEAN, SIGNIFICANT, Study, Table

QUESTIONS = Path(__file__).with_name("questions.md")
PUBLISHED, AGAIN = (0.66, 0.84), 0.02
NEAR, LITTLE, CHANCE = 0.01, 0.01, 0.05
ALL = (*METHODS, *PRIVATE)
JUDGED = [one.name for one in METHODS if one.baseline not in ("", POOLED)]
DISCRIMINATION, LARGE, SLOPE = "AUC, in per cent", "calibration in the large", "calibration slope"
BEST = {LARGE: 0.0, SLOPE: 1.0}  # ideal value of a calibration; the nearer to this value, the better
MEASURES = {DISCRIMINATION: auc, LARGE: calibration_in_the_large, SLOPE: calibration_slope}
Predictions = Mapping[str, Mapping[str, Found]]


@dataclass(frozen=True)
class Quantity:
    part: str
    studies: Lines
    found: Mapping[str, list[Estimate]]

    def compared(self, name: str) -> np.ndarray:
        """Return for each study the value that is compared: an AUC, or the distance of a calibration from its ideal."""
        values = np.array([one.value for one in self.found[name]])
        return np.abs(values - BEST[self.part]) if self.part in BEST else values

    @cached_property
    def differences(self) -> dict[str, Estimate]:
        """Return each configuration's mean difference from the configuration with which it is compared."""
        return {one.name: mean_of(self.compared(one.name) - self.compared(one.baseline)) for one in ALL if one.baseline}

    @cached_property
    def p(self) -> dict[str, float]:
        return holm({name: self.differences[name].p for name in JUDGED})

    def cells(self, name: str) -> list[str]:
        scale, digits = (1.0, 2) if self.part in BEST else (100.0, 1)
        mean = f"{fmean(one.value for one in self.found[name]) * scale:.{digits}f}"
        row = [name, *(one.text(scale, digits) for one in self.found[name]), mean]
        if name not in self.differences:
            return row
        told, p = self.differences[name].text(scale, digits, "+"), self.p.get(name)
        mark = SIGNIFICANT if p is not None and p < CHANCE else ""
        return [*row, f"{mark}{told}{mark}", "–" if p is None else f"{p:.3f}"]

    def tables(self) -> list[Table]:
        sizes = {study: len(lines) for study, lines in self.studies.items()}
        kinds = {name: next((one.baseline for one in ALL if one.name == name), "") for name in self.found}
        made = []
        for baseline in dict.fromkeys(kinds.values()):
            heads = ("configuration", *sizes, MEAN, *((LESS + baseline, "p") if baseline else ()))
            rows = [self.cells(name) for name, own in kinds.items() if own == baseline]
            patients = {**sizes, MEAN: sum(sizes.values())}
            made.append(Table(heads, rows, self.part, seeds="1", patients=patients))
        return made

    def judged(self) -> str:
        told = []
        for name in JUDGED:
            better = (self.differences[name].value > 0) != (self.part in BEST)
            verdict = ("better" if better else "worse") if self.p[name] < CHANCE else "no difference found"
            told.append(f"{name}: {verdict} (p {self.p[name]:.3f})")
        return "; ".join(told)


def answers(quantities: Mapping[str, Quantity], predictions: Predictions) -> list[str]:
    aucs = quantities[DISCRIMINATION]
    low, high = (own(one.value for one in aucs.found[POOLED_ALL]) for own in (min, max))
    again = max(abs(low - PUBLISHED[0]), abs(high - PUBLISHED[1])) <= AGAIN
    apart = float(np.abs(aucs.compared("FedAvg") - aucs.compared(POOLED)).max())
    costs = {one.name: aucs.differences[one.name] for one in PRIVATE}
    private = (f"{name}: {_yes(-own.low < LITTLE)}, {own.text(100, 2, '+')} points" for name, own in costs.items())
    return [
        f"1. {_yes(again)}: {low:.3f} to {high:.3f}; published {PUBLISHED[0]} to {PUBLISHED[1]}.",
        f"2. {_yes(apart <= NEAR)}: at most {apart:.4f} apart.",
        f"3. {aucs.judged()}.",
        *(f"4. {part}: {quantities[part].judged()}." for part in BEST),
        f"5. {'; '.join(private)}.",
        f"6. {'; '.join(_chosen(predictions, name) for name in aucs.found if name.startswith('FedSM'))}.",
    ]


def _yes(true: bool) -> str:
    return "yes" if true else "no"


def _chosen(predictions: Predictions, name: str) -> str:
    shares, recognised = ([own[name][key] for own in predictions.values()] for key in ("personal", "recognised"))
    return (
        f"{name}: a personal model predicts at {sum(share > 0 for share in shares)} of {len(shares)} studies, "
        f"{100 * fmean(shares):.0f} % of patients; the selector names the own study of {100 * fmean(recognised):.0f} % "
        "of validation patients"
    )


def study(studies: Lines, predictions: Predictions) -> Study:
    quantities = {}
    for part, measure in MEASURES.items():
        found: dict[str, list[Estimate]] = {}
        for left_out, lines in studies.items():
            for name, own in predictions[left_out].items():
                found.setdefault(name, []).append(measure(np.array(own["scores"]), deaths(lines)))
        quantities[part] = Quantity(part, studies, found)
    header = {
        "title": "IMPACT: studies of brain injury, each left out of training once",
        "data": f"IMPACT, {sum(map(len, studies.values())):,} patients of {len(studies)} studies",
        "command": "python -m results.impact --write",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "about": [*WORDS, f"Training: {', '.join(f'{key} {value}' for key, value in TRAINING.items())}."],
        "declared": re.findall(r"^(\d+\. .+)$", QUESTIONS.read_text("utf-8"), re.M),
        "finding": answers(quantities, predictions),
    }
    return Study(header, [table for quantity in quantities.values() for table in quantity.tables()])


WORDS = (
    "Real data (IMPACT, from R's package metamisc, GPL-3; not part of this project): age, motor score, pupils; death "
    "within six months. A study's value is what models of the other studies predict for all of its patients. AUC with "
    "DeLong's interval; calibration, in log odds, with Wald's. Differences have Student's interval over studies; p is "
    "corrected for seven methods, and 'significant' follows from it. Those of a calibration are of its distance from 0 "
    "in the large, from 1 of the slope: below zero is better.",
    "Every fifth patient of a study that trains validates and trains nothing; only FedSM's threshold uses them. In the "
    "second pooled regression they train, as in the published protocol.",
    "FedBN, AdaFed, Ditto and local leave no model for a study that did not train: an ensemble averages the "
    "probabilities of 14 models, which count alike. FedBN and AdaFed need batch norm, so they have a hidden layer of "
    "16 and are compared with FedAvg that has one. AdaFed trains its f on a fifth of the training patients, declared "
    "public.",
    "Privacy: each site's account is of its training, for a record, δ = 0.0001. Noise and samples come from the "
    "machine, so a rerun has somewhat other digits. Numbers of cases are public, as the data are.",
)
