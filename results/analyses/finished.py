"""Read a finished run's models and the data of all its sites, which must be on this machine."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors
from medsilo.federation.protection import read_for
from medsilo.learning.sampling import drawn_cases
from medsilo.learning.seeds import generator_for
from medsilo.plan import Plan, load_plan
from medsilo.runs import paths
from medsilo.runs.paths import site_folder
from medsilo.runs.schema import Summary
from medsilo.site.settings import SiteSettings
from medsilo.tasks.site_data import SiteData
from medsilo_lab.engines.centralised import POOL
from medsilo_server.record import Record


@dataclass(frozen=True)
class FinishedRun:
    folder: Path
    label: str
    plan: Plan
    summary: Summary

    @property
    def sites(self) -> list[str]:
        return sorted(self.summary.agreed.sites)

    def data(self, site: str, settings: SiteSettings) -> SiteData:
        source = read_for(self.plan, settings.of(site).data)
        data = self.plan.task.site_data(site, self.sites, self.plan.seed, source)
        return SiteData(
            *(
                drawn_cases(part, self.plan.task.piece, self.plan.seed)
                for part in (data.train, data.validation, data.test)
            )
        )

    def model(self, site: str, device: torch.device) -> nn.Module:
        """Return the model that the site tested, in evaluation mode: the personal model, the pooled model or the global
        model.
        """
        own, pool = (site_folder(self.folder, name) for name in (site, POOL))
        folders = [own, pool, self.folder / paths.GLOBAL]
        files = [folder / paths.BEST for folder in folders]
        path = next((file for file in files if file.exists()), None)
        if path is None:
            raise MedsiloError(f"run '{self.folder.name}': no model of {site} is here; analyse a run that has it")
        model = self.plan.algorithm.whole(self.plan.build_networks())
        model.load_state_dict(load_tensors(path)[0])
        return model.to(device).eval()

    def experts(self, device: torch.device) -> dict[str, nn.Module]:
        """Return each site's personal model from the run's super model, in evaluation mode. Without a super model, the
        mapping is empty.
        """
        found = {}
        for path in sorted((self.folder / paths.SUPER_MODEL).glob("personal/*.safetensors")):
            model = self.plan.network.build(self.plan.task.channels, self.plan.task.goal.outputs)
            model.load_state_dict(load_tensors(path)[0])
            found[path.stem] = model.to(device).eval()
        return found

    def facts(self) -> dict[str, Any]:
        keys = {"method", "title", "task", "synthetic", "network", "seed", "protocol", "plan_hash"}
        keys |= {"packages", "rounds"}
        return {"label": self.label, "run": self.folder.name} | self.summary.model_dump(mode="json", include=keys)


def read_finished(folders: Sequence[Path]) -> list[FinishedRun]:
    """Return finished runs; if several runs have the same title, the names of their folders are added to the titles."""
    runs = []
    for folder in folders:
        summary = Record(folder).summary()
        if summary is None or not summary.finished:
            raise MedsiloError(f"{folder.name}: there is no finished run; give a folder that medsilo run has written")
        runs.append(FinishedRun(folder, summary.title, load_plan(folder / paths.PLAN), summary))
    titles = Counter(run.label for run in runs)
    if len({run.folder.resolve() for run in runs}) < len(runs):
        raise MedsiloError("a run is given twice; give each once")
    return [replace(run, label=f"{run.label}, {run.folder.name}") if titles[run.label] > 1 else run for run in runs]


def drawn(data: Dataset, most: int, seed: int, *purpose: str) -> Subset:
    """Return at most `most` random cases in the data set's order; `seed` and `purpose` determine the cases."""
    order = torch.randperm(len(data), generator=generator_for(seed, "cases", *purpose))  # type: ignore[arg-type]
    return Subset(data, sorted(order[:most].tolist()))
