"""Provide the pre-trained network f with which AdaFed's sites measure feature statistics."""

import hashlib
import math
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from pydantic import Field
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from medsilo.core.errors import MedsiloError
from medsilo.core.section import Section
from medsilo.core.text import plain
from medsilo.learning.drawn import drawn_cases
from medsilo.learning.loop import OutputLoss, batches, lesson, train_epoch
from medsilo.learning.seeds import generator_for, seed_for
from medsilo.schedule.phase import ServerSide

REMEDY = (
    "put it there and name the folder as `data` in the server's medsilo.yaml, or choose f-adafed, which needs no "
    "pre-trained model and no shared data"
)


class Pretraining(Section):
    """The source of the pre-trained network f; if the server trains f, it uses the optimizer of the plan's section
    `training`.
    """

    source: Literal["share", "file", "initial"] = Field(
        "share",
        description="origin of f. `initial`: f has the initial weights, for networks that start from a checkpoint. "
        "`share`: the server trains f on a share of every site's training cases, **which the site thereby releases to "
        "the server**. The released cases are in the server's data folder, in the sites' layout; the server generates "
        "synthetic cases itself. `file`: the weights are in a `.safetensors` file in the server's data folder",
    )
    share: float = Field(0.2, gt=0, le=1, description="share of the training cases that are public")
    epochs: int = Field(15, ge=1, le=1000, description="passes over the public cases")
    file: str = Field(
        "pretrained.safetensors",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$",
        description="name of the file with the weights",
    )

    def obtain(self, model: nn.Module, at: ServerSide) -> dict[str, Any]:
        if self.source == "initial":
            return {"source": "initial"}
        return (
            self._read(model, at.data.folder if at.data else None) if self.source == "file" else self._train(model, at)
        )

    def _read(self, model: nn.Module, folder: Path | None) -> dict[str, Any]:
        path = folder / self.file if folder else None
        if path is None or not path.is_file():
            raise MedsiloError(f"the pre-trained model {self.file} is not in the server's data folder; {REMEDY}")
        try:
            content = path.read_bytes()
            tensors = safetensors.torch.load(content)
        except (OSError, safetensors.SafetensorError) as error:
            raise MedsiloError(
                f"the pre-trained model {self.file} cannot be read ({type(error).__name__}); give a .safetensors file"
            ) from error
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            why = plain(str(error).partition("\n")[2], 200)
            told = f"the pre-trained model {self.file} does not fit the plan's network ({why})"
            raise MedsiloError(f"{told}; train this model with the plan's network") from error
        return {"source": "file", "file": self.file, "sha256": hashlib.sha256(content).hexdigest(), "data": "not known"}

    def _train(self, model: nn.Module, at: ServerSide) -> dict[str, Any]:
        if (at.task.needs_data or at.task.scripted) and at.data is None:
            raise MedsiloError(f"the public share of the data is not at the server; {REMEDY}")
        parts = [self._public(at.task.site_data(site, at.sites, at.seed, at.data).train, site, at) for site in at.sites]
        public = drawn_cases(ConcatDataset(parts), at.task.piece, seed_for(at.seed, "pre-training pieces"))
        compute = at.compute()
        model.to(compute.device).requires_grad_(True)
        optimizer = at.training.make_optimizer(model.parameters())
        learn = lesson(model, OutputLoss(at.task.goal.loss), optimizer, compute)
        loss = math.nan
        with compute.reproducible(seed_for(at.seed, "pre-training")):
            for epoch in range(self.epochs):
                order = generator_for(at.seed, "pre-training", epoch)
                data = batches(public, at.training.batch_size, compute, order)
                loss = train_epoch(data, [learn], compute, at.stop)
        if not math.isfinite(loss):
            raise MedsiloError("pre-training diverged: its loss is NaN or infinite; lower training.learning_rate")
        model.to("cpu").requires_grad_(False)
        return {
            "source": "share",
            "data": f"{self.share:.0%} of every site's training cases, declared public and read at the server",
            "cases": sum(map(len, parts)),  # type: ignore[arg-type]
            "epochs": self.epochs,
            "train_loss": loss,
        }

    def _public(self, train: Dataset, site: str, at: ServerSide) -> Dataset:
        cases = len(train)  # type: ignore[arg-type]
        order = torch.randperm(cases, generator=generator_for(at.seed, site, "public share"))
        return Subset(train, order[: math.ceil(self.share * cases)].sort().values.tolist())
