"""Load the model for predictions: a super model, or a single model of a run."""

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from medsilo.core import model_folders, weight_cache
from medsilo.core.errors import MedsiloError
from medsilo.core.files import load_tensors, save_tensors, write_text
from medsilo.core.text import is_safe_name
from medsilo.deploy.supermodel import MANIFEST, SuperModel, filled
from medsilo.plan import Plan, load_plan
from medsilo.runs import paths
from medsilo.tasks.task import Task

# metadata key of a tensor file from which the layers that only training needs were removed
PLAIN = "plain"
SINGLE = "model"  # name of the expert in a model with only one expert
GLOBAL_MODEL = f"{paths.GLOBAL}/{paths.BEST}"
MOST_MEMBERS = 16


class Committee(nn.Module):
    """An ensemble of several models. The output is the logit of the mean probability, so that softmax or sigmoid of the
    output is the mean probability.

    In a regression, the output is the mean of the predictions. The squared error of an ensemble is at most the average
    squared error of its members (Krogh and Vedelsby, NeurIPS 1994).
    """

    def __init__(self, task: Task, members: Sequence[nn.Module]) -> None:
        super().__init__()
        if not task.goal.by_case and not task.goal.classifies:
            raise MedsiloError(
                "survival models form no ensemble, because their risks cannot be compared; give one model"
            )
        self.members = nn.ModuleList(members)
        self.chooses = task.goal.outputs > 1 and not task.goal.overlaps
        self.decides = not self.chooses and task.goal.classes > 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = torch.stack([member(inputs) for member in self.members])
        if self.chooses:
            return _log_mean(outputs.log_softmax(2))
        if self.decides:
            sigmoid = nn.functional.logsigmoid
            return _log_mean(sigmoid(outputs)) - _log_mean(sigmoid(-outputs))
        return outputs.mean(0)


def _log_mean(logarithms: Tensor) -> Tensor:
    return torch.logsumexp(logarithms, 0) - math.log(len(logarithms))


@dataclass(frozen=True)
class Source:
    """A model for prediction, and the plan with which it was trained."""

    network: nn.Module
    plan: Plan
    facts: dict[str, Any]
    run: Path | None = None  # folder of the run in which the model was trained, if the model is in a run folder
    # the hospital's folder in the run, or the folder of the model if the hospital's folder is not on this machine
    site_part: Path | None = None
    round: int | None = None  # the round whose model was selected, or None for an ensemble

    @classmethod
    def open(cls, folder: Path, site: str = "") -> Self:
        """Open the super model of a folder. If `site` is given, or if there is no super model, open a single model of a
        run.
        """
        if not site:
            for place, run in ((folder, folder.resolve().parent), (folder / paths.SUPER_MODEL, folder)):
                if (place / MANIFEST).is_file():
                    return cls._super(SuperModel.load(place), run, place)
        if not folder.is_dir():
            raise MedsiloError("the folder does not exist; give the folder of a run or super model", str(folder))
        runs = sorted(path.parent.name for path in folder.glob("*/plan.yaml"))
        if runs and (folder / paths.VERDICT).exists():
            raise MedsiloError(f"the folder is a comparison; give one of its runs, like {runs[0]}", str(folder))
        if not (folder / paths.PLAN).is_file():
            why = "no super model and no run is there; give a folder with supermodel.json or plan.yaml"
            raise MedsiloError(why, str(folder))
        plan = load_plan(folder / paths.PLAN)
        name = _single(folder, site)
        tensors, facts = load_tensors(folder / name)
        if facts.get("plan_hash") != plan.hash:
            raise MedsiloError(f"{name} was not made by the plan.yaml beside it (or by another version of medsilo)")
        network = _filled_network(plan, tensors, name, bool(facts.get(PLAIN)))
        told = {"kind": "model", "file": name, "plan_hash": plan.hash}
        return cls(network.eval(), plan, told, folder, (folder / name).parent, facts.get("round"))

    @classmethod
    def _super(cls, model: SuperModel, run: Path, folder: Path) -> Self:
        assert model.origin is not None
        plan = model.origin.plan
        facts = {"kind": "super model", "rule": model.rule, "threshold": model.threshold, "plan_hash": plan.hash}
        return cls(model, plan, facts, run, folder)

    @classmethod
    def together(cls, sources: Sequence[Self]) -> Self:
        """Combine models of the same task into an ensemble, or return a single model unchanged."""
        first, *others = sources
        if not others:
            return first
        if len(sources) > MOST_MEMBERS:
            raise MedsiloError(f"{len(sources)} models are too many for an ensemble; give {MOST_MEMBERS} at most")
        task, *tasks = (source.plan.task for source in sources)
        if any(other != task for other in tasks):
            why = "these models were trained for different tasks; give models of one task, with equal keys"
            raise MedsiloError(why)
        committee = Committee(task, [source.network for source in sources]).eval()
        facts = {"kind": "committee", "members": [source.facts for source in sources]}
        return cls(committee, first.plan, facts, first.run)

    def answer(self, x: Tensor) -> tuple[Tensor, list[str], Tensor | None]:
        """Return the output, the name of each case's expert, and the selector's confidence in each case. For a model
        without a selector, return None as the confidence.
        """
        if isinstance(self.network, SuperModel):
            return self.network.answer(x)
        return self.network(x), [SINGLE] * len(x), None

    def save(self, folder: Path) -> None:
        if isinstance(self.network, SuperModel):
            self.network.save(folder)
        else:
            facts = {"plan_hash": self.plan.hash, PLAIN: True}
            save_tensors(folder / GLOBAL_MODEL, self.network.state_dict(), facts)
            write_text(folder / paths.PLAN, self.plan.to_yaml())

    def copy(self, out: Path) -> None:
        if isinstance(self.network, SuperModel):
            assert self.site_part
            shutil.copytree(self.site_part, out)
        else:
            assert self.run
            out.mkdir(parents=True)
            shutil.copyfile(self.run / paths.PLAN, out / paths.PLAN)
            shutil.copyfile(self.run / self.facts["file"], out / paths.BEST)
        weight_cache.keep_beside(self.plan.network.files, out / model_folders.FOLDER)


def _filled_network(plan: Plan, tensors: dict[str, Tensor], name: str, plain: bool) -> nn.Module:
    """Build the plan's network without the layers that only training needs, and load the tensors. `plain` is true if no
    tensor belongs to a layer that only training needs.
    """
    made = plan.model_copy(update={"network": plan.network.plain}) if plain else plan
    networks = made.build_networks()
    filled(plan.algorithm.whole(networks), name, tensors)
    if not plain:
        networks["model"] = plan.network.finished(networks["model"], plan.task.channels, plan.task.goal.outputs)
    return plan.algorithm.whole(networks)


def _single(folder: Path, site: str) -> str:
    for shared in (GLOBAL_MODEL, paths.BEST):
        if not site and (folder / shared).is_file():
            return shared
    own = sorted(path.parent.name for path in folder.glob(f"{paths.SITES}/*/{paths.BEST}"))
    if not site:
        raise MedsiloError(
            f"every hospital of this run has a personal model; choose a hospital with --site: {', '.join(own)}"
        )
    if not is_safe_name(site) or site not in own:
        there = f"choose one of: {', '.join(own)}" if own else "it has none of one hospital alone; leave --site out"
        raise MedsiloError(f"--site {site}: the run has no model of that hospital; {there}")
    return f"{paths.SITES}/{site}/{paths.BEST}"
