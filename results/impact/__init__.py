"""Define the IMPACT studies: 15 studies of mortality within six months after brain injury; each study is once left out
of training and predicted.

If a method has personal models and no shared model, all 14 personal models predict as an ensemble with averaged
probabilities.
"""

import csv
import json
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from medsilo.core.errors import MedsiloError
from medsilo.deploy.supermodel import GLOBAL, SuperModel
from medsilo.plan import Plan, parse_plan
from medsilo.runs import paths
from medsilo.site.settings import SiteSettings, make_settings
from results.flamby import Lines, write_tables
from tests import inprocess

LEVELS = {"motor_score": ("1/2", "3", "4", "5/6"), "pupil": ("Both", "One", "None")}
# the core model's columns; the age is scaled by public round numbers, because a site's own statistics are private
COLUMNS = (
    {"name": "age", "mean": 35, "deviation": 15},
    *({"name": name, "levels": list(levels)} for name, levels in LEVELS.items()),
)
TRAINING = {"rounds": 10, "batch_size": 64, "learning_rate": 0.1, "momentum": 0.9}
PROMISE = {"delta": 1e-4, "clip": 2.0}
WHOLE = "-whole"  # suffix of the name of a table in which all of a study's patients are test cases
POOLED, POOLED_ALL = "pooled logistic regression", "pooled, validation patients too"
# "scores" has each patient's log odds of death; with a super model, the dictionary also names the model that answered
Found = dict[str, Any]


@dataclass(frozen=True)
class Configuration:
    """A federated method with its network. `baseline` is the configuration with which the method is compared."""

    name: str
    algorithm: Mapping[str, Any]
    baseline: str = "FedAvg"
    network: Mapping[str, Any] = field(default_factory=lambda: {"name": "linear"})
    epsilon: float | None = None
    ensemble: bool = False


FEDAVG, BASE, HIDDEN = {"name": "fedavg"}, "FedAvg, hidden layer", {"name": "mlp", "hidden": [16]}
METHODS = (
    Configuration("FedAvg", FEDAVG, POOLED),
    Configuration("HarmoFL, step", {"name": "harmofl", "amplitude": None}),
    Configuration("FedSM", {"name": "fedsm"}),
    Configuration("FedSM, selector always trusted", {"name": "fedsm", "selector_least": 0}),
    Configuration("Ditto, ensemble", {"name": "ditto"}, ensemble=True),
    Configuration("local, ensemble", {"name": "local"}, ensemble=True),
    Configuration(BASE, FEDAVG, "", HIDDEN),
    Configuration("FedBN, ensemble", {"name": "fedbn"}, BASE, HIDDEN, ensemble=True),
    Configuration("AdaFed, ensemble", {"name": "adafed"}, BASE, HIDDEN, ensemble=True),
)
PRIVATE = tuple(Configuration(f"FedAvg, ε = {one}", FEDAVG, epsilon=one) for one in (1, 3, 8))


def begin() -> None:
    """Prepare a process that trains with one thread."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def read(path: Path) -> Lines:
    """Return each study's patients in the file's order; every fifth patient is a validation case."""
    if not path.is_file():
        told = "impact.csv is not there; put it (from data/impact.rda of R's package metamisc) there, or give --data"
        raise MedsiloError(told, private=str(path))
    studies: Lines = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            own = studies.setdefault(row["name"].replace(" ", "-"), [])
            read = {name: row[name] for name in ("age", *LEVELS)}
            own.append({**read, "outcome": int(row["mort"]), "part": "validation" if len(own) % 5 == 4 else "train"})
    return dict(sorted(studies.items()))


def deaths(lines: list[dict[str, Any]]) -> np.ndarray:
    """Return 1 for each patient who died within six months, and 0 for all other patients."""
    return np.array([line["outcome"] for line in lines])


class Work:
    def __init__(self, studies: Lines, tables: Path, training: Mapping[str, Any] = TRAINING) -> None:
        self.studies, self.tables, self.training = studies, tables, training
        # every training site must have test cases, so validation patients stand in for them, and their test scores are
        # ignored
        own = {
            study: [*lines, *(one | {"part": "test"} for one in lines if one["part"] == "validation")]
            for study, lines in studies.items()
        }
        whole = {study + WHOLE: [one | {"part": "test"} for one in lines] for study, lines in studies.items()}
        write_tables({**own, **whole}, tables)

    @property
    def settings(self) -> SiteSettings:
        own = {"device": "cpu", "threads": 1, "share_personal_model": True}
        return make_settings({"data": str(self.tables), "public_data": True, **own}, "the benchmark")

    def plan(self, configuration: Configuration, left_out: str) -> Plan:
        others = [study for study in self.studies if study != left_out]
        tested = [] if configuration.ensemble else [left_out + WHOLE]
        privacy = {"privacy": {"epsilon": configuration.epsilon, **PROMISE}} if configuration.epsilon else {}
        return parse_plan(
            {
                "algorithm": dict(configuration.algorithm),
                "task": {"name": "table", "columns": list(COLUMNS), "standardise": "plan"},
                "network": dict(configuration.network),
                "training": dict(self.training),
                "participation": {"sites": others, "evaluation_sites": tested},
                "model_selection": {"keep": "last", "validate_every": self.training["rounds"]},
                **privacy,
            }
        )

    def predicted(self, configuration: Configuration, left_out: str, cells: Path) -> Found:
        plan = self.plan(configuration, left_out)
        path = cells / f"{left_out}-{plan.hash[:16]}.json"
        if not path.exists():
            found = self._run(plan, left_out, configuration.ensemble)
            cells.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found), "utf-8")
        return dict(json.loads(path.read_text("utf-8")))

    def _run(self, plan: Plan, left_out: str, ensemble: bool) -> Found:
        site, source = left_out + WHOLE, self.settings.data
        assert source
        cases: Any = plan.task.site_data(site, [site], plan.seed, source.for_study(only_tested=True)).test
        if len(cases) != len(self.studies[left_out]):
            raise MedsiloError(f"{left_out}: {len(cases)} of {len(self.studies[left_out])} patients can be read")
        with tempfile.TemporaryDirectory(prefix="medsilo-") as place:
            done = inprocess.run(plan, folder=Path(place, "run"), settings=self.settings)
            if done.summary.details.super_model:
                return _by_super_model(done, cases.inputs)
            models = done.models.values() if ensemble else [done.models[site]]
            chances = torch.stack([log_odds(model, cases.inputs).sigmoid() for model in models])
            return {"scores": chances.mean(0).logit().tolist()}

    def pooled(self, left_out: str, everybody: bool) -> Found:
        """Return the predictions of scikit-learn's logistic regression, which is trained on all studies except the
        predicted study.

        Args:
            everybody: True also trains on patients that are validation cases in the federations.
        """
        others = [one for study, lines in self.studies.items() if study != left_out for one in lines]
        kept = [one for one in others if everybody or one["part"] == "train"]
        model = LogisticRegression(C=np.inf, solver="newton-cholesky").fit(_terms(kept), deaths(kept))
        return {"scores": model.decision_function(_terms(self.studies[left_out])).tolist()}

    def all_of(self, left_out: str, cells: Path) -> dict[str, Found]:
        pooled = {POOLED_ALL: self.pooled(left_out, everybody=True), POOLED: self.pooled(left_out, everybody=False)}
        return pooled | {one.name: self.predicted(one, left_out, cells) for one in (*METHODS, *PRIVATE)}


def _terms(lines: list[dict[str, Any]]) -> np.ndarray:
    """Return the core model's terms: the age, and for each categorical variable one indicator of each category except
    the first.
    """
    kinds = [(name, level) for name, levels in LEVELS.items() for level in levels[1:]]
    return np.array([[float(one["age"]) / 10, *(one[name] == level for name, level in kinds)] for one in lines], float)


@torch.no_grad()
def _by_super_model(done: inprocess.StudyResult, inputs: Tensor) -> Found:
    said = done.summary.details.super_model
    assert said
    output, chosen, _ = SuperModel.load(done.root / paths.SUPER_MODEL, done.plan).eval().answer(inputs)
    own = [counts.get(site, 0) / sum(counts.values()) for site, counts in said.validated.items() if counts]
    personal = fmean(name != GLOBAL for name in chosen)
    return {"scores": output[:, 0].double().tolist(), "personal": personal, "recognised": fmean(own)}


@torch.no_grad()
def log_odds(model: nn.Module, inputs: Tensor) -> Tensor:
    return model.eval()(inputs)[:, 0].double()
