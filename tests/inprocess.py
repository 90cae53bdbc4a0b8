"""Run studies in one process, and store their results and models in a temporary folder."""

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from medsilo.core.files import load_tensors
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.rounds import Round
from medsilo.runs.schema import Summary
from medsilo_lab.engines import inprocess
from medsilo_lab.engines.centralised import POOL
from medsilo_lab.engines.inprocess import Loop
from medsilo_server.record import new_study

__all__ = ["Loop", "StudyResult", "run"]


@dataclass(frozen=True)
class StudyResult:
    plan: Plan
    root: Path
    history: list[Round]
    summary: Summary

    @cached_property
    def models(self) -> dict[str, nn.Module]:
        """Return every site's model after the last round, read from the sites' folders at the first use."""
        pooled = self.plan.algorithm.pooled
        return {
            site: _last_model(self.plan, paths.site_folder(self.root, POOL if pooled else site))
            for site in self.plan.participation.everyone
        }


def run(plan: Plan, *, folder: Path | None = None, **how: Any) -> StudyResult:
    with nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="medsilo-") as place:
        root = folder or Path(str(place)) / new_study(plan)
        record = inprocess.run(plan, folder=root, **how)
        summary = record.summary()
        assert summary
        done = StudyResult(plan, root, record.rounds(), summary)
        if not folder:
            _ = done.models  # loads the models before the folder with the models is removed
        return done


def _last_model(plan: Plan, folder: Path) -> nn.Module:
    model = plan.algorithm.whole(plan.build_networks())
    model.load_state_dict(load_tensors(folder / paths.LAST)[0])
    return model
