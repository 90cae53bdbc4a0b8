"""Studies in one process, and what came of them: their models, too, where no folder is given that stays."""

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from medsilo.core.files import load_tensors
from medsilo.federation import inprocess
from medsilo.federation.centralised import POOL
from medsilo.federation.inprocess import Loop
from medsilo.plan import Plan
from medsilo.runs import paths
from medsilo.runs.record import new_study
from medsilo.runs.rounds import Round
from medsilo.runs.schema import Summary

__all__ = ["Loop", "StudyResult", "run"]


@dataclass(frozen=True)
class StudyResult:
    """A finished study."""

    plan: Plan
    root: Path
    history: list[Round]
    summary: Summary

    @cached_property
    def models(self) -> dict[str, nn.Module]:
        """Every site's model after the last round, read from the sites' folders when it is first asked for."""
        pooled = self.plan.algorithm.pooled
        return {
            site: _last_model(self.plan, paths.site_folder(self.root, POOL if pooled else site))
            for site in self.plan.participation.everyone
        }


def run(plan: Plan, *, folder: Path | None = None, **how: Any) -> StudyResult:
    """Run a plan over its sites, as `medsilo.federation.inprocess.run` does."""
    with nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="medsilo-") as place:
        root = folder or Path(str(place)) / new_study(plan)
        record = inprocess.run(plan, folder=root, **how)
        summary = record.summary()
        assert summary
        done = StudyResult(plan, root, record.rounds(), summary)
        if not folder:
            _ = done.models  # before their folder goes
        return done


def _last_model(plan: Plan, folder: Path) -> nn.Module:
    model = plan.algorithm.whole(plan.build_networks())
    model.load_state_dict(load_tensors(folder / paths.LAST)[0])
    return model
