"""The interface of predictors. A task names the predictor that reads the files and writes the predictions."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from medsilo.core.errors import MedsiloError, reading
from medsilo.core.files import make_folder, write_csv, write_json
from medsilo.core.text import counted, is_safe_name
from medsilo.learning.compute import Compute
from medsilo.registry import PluginTable
from medsilo.runs import paths
from medsilo.tasks.case_index import CaseIndex
from medsilo.tasks.own.own_numbers import Scales
from medsilo.tasks.sources import DataSource
from medsilo_lab.deploy.predict import PredictedImage, predict_all
from medsilo_lab.deploy.source import Source

PREDICTORS = PluginTable("medsilo.predictors", "medsilo_lab.deploy.predictor:Predictor", {})
Say = Callable[[str], None]
AT_ONCE = 4096
NEEDS = (
    "the plan standardises numbers by each hospital's own mean and deviation (task.standardise=site); give "
    "--settings with the medsilo.yaml of the hospital whose patients these are, or --site with its name, where its "
    "part of the run is on this machine"
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Predictor(ABC):
    """Predicts one kind of data, such as images or tables. A predictor holds the files that the user gave, the model
    and the output folder.

    Subclasses are entry points in the group `medsilo.predictors`. The field `use` of a task contains the name of the
    task's predictor.

    >>> import torch
    >>> from pathlib import Path
    >>> class Counting(Predictor):
    ...     cases = "recordings"
    ...     def predict(self): return len(self.given)
    >>> Counting(None, [Path("a")], Path("out"), torch.device("cpu"), print, data=None, site_part=Path("run")).predict()
    1
    """

    cases: ClassVar[str]  # a plural noun for the cases that are predicted, such as "images"

    source: Source
    given: Sequence[Path]
    out: Path
    device: torch.device
    say: Say  # a function that receives lines of text; the lines must not contain file names
    data: DataSource | None  # the hospital's description of its data, which determines how files are read
    site_part: Path  # the folder of the hospital in the run, if the model was trained on this machine

    @abstractmethod
    def predict(self) -> int:
        """Write predictions.csv and predictions.json. Return the number of cases that failed."""

    def files(self, endings: tuple[str, ...] = ("",)) -> list[Path]:
        """Return the given files, and all files in the given folders that have one of the suffixes. Hidden files are
        left out.
        """
        below = [CaseIndex.files_below(path)[0].items() if path.is_dir() else [("", path)] for path in self.given]
        return [file for files in below for name, file in files if not name or name.lower().endswith(endings)]

    def scales(self, plain: Callable[[], Scales]) -> Scales:
        """Return the means and deviations with which the values of a hospital are standardised. If the hospital took
        part in training, its stored means and deviations from training are returned. If the hospital did not take part,
        the means and deviations are calculated from all its data. `plain` returns fixed means and deviations for tasks
        that use no statistics of a hospital.
        """
        task: Any = self.source.plan.task
        if (self.site_part / paths.DATA).is_file():
            with reading(f"the site's {paths.DATA}"):
                return task.scales_that_were(json.loads((self.site_part / paths.DATA).read_text("utf-8"))["scales"])
        if not task.needs_scales:
            return plain()
        if self.data is None:
            raise MedsiloError(NEEDS)
        return task.own_scales(self.data)

    @torch.inference_mode()
    def answers(self, inputs: Tensor, target: str = "") -> Iterator[Row]:
        """Yield a row with the model's prediction for each case. `target` is the name of the quantity that a regression
        predicts.
        """
        source = self.source
        for cases in inputs.split(AT_ONCE):
            output, experts, sure = source.answer(cases.to(self.device))
            if not output.isfinite().all():
                raise MedsiloError("the network's output is NaN or infinite; check the values of the inputs")
            for place, answer in enumerate(source.plan.task.goal.answers(output.cpu(), target)):
                chosen = {} if sure is None else {"expert": experts[place], "confidence": float(sure[place])}
                yield {"error": None, **answer, **chosen}

    def predict_rows(
        self, files: Sequence[Path], predicted: Callable[[Path], Iterator[Row]], columns: Sequence[str]
    ) -> list[Row]:
        """Write predictions.json and predictions.csv with the rows of all files, and return the rows.

        Each row has the key `error`, with the value None if the prediction succeeded. The file predictions.csv always
        has the columns in `columns`.
        """
        if any(path.resolve().parent == self.out.resolve() for path in files):
            raise MedsiloError(
                "the files are in the output folder; choose another folder with -o, so that no file is overwritten"
            )
        self.source.network.to(self.device)
        make_folder(self.out)
        rows: list[Row] = []
        for path in files:
            found = list(predicted(path))
            failed = failures(found)
            self.say(counted(len(found), "case") + (f", {failed} of them failed" if failed else ""))
            rows += found
        write_json(self.out / "predictions.json", {"model": self.source.facts, "cases": rows})
        write_csv(self.out / "predictions.csv", rows, columns)
        return rows

    def predict_images(self, images: Sequence[PredictedImage]) -> int:
        """Predict every image, and write predictions.json, predictions.csv and an overview. Return the number of images
        that failed.
        """
        return predict_all(self.source, images, self.out, self.device, self.say)


def failures(rows: Sequence[Row]) -> int:
    return sum(row["error"] is not None for row in rows)


def asked_to_predict(
    models: Sequence[Path],
    given: Sequence[Path],
    out: Path,
    site: str,
    data: DataSource | None,
    compute: Compute,
    say: Say,
) -> Predictor:
    """Open the models as an ensemble, and return the predictor for the task of the models."""
    if (out / "predictions.csv").exists():
        raise MedsiloError("the folder already has predictions; choose another folder with -o", str(out))
    source = Source.together([Source.open(folder, site) for folder in models])
    run = models[0] / paths.SITES / site if is_safe_name(site) else models[0]
    source = replace(source, site_part=run)
    name, task = source.plan.task.use.predictor, source.plan.task.name
    if name not in PREDICTORS:
        raise MedsiloError(
            f"task {task} reads no files, so there is nothing to predict; give a model of images, tables or "
            f"recordings; to try the command, use synthetic-prostate"
        )
    predicting: Predictor = PREDICTORS[name](source, given, out, compute.device, say, data, run)
    return predicting
