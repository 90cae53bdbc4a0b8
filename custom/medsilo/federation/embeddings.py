"""Compute and save the embeddings of a site's cases: the outputs of the frozen part of the plan's network.

The site computes each embedding once, saves the embedding on the site's disk, and never sends the embedding.
"""

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from medsilo.core.errors import MedsiloError
from medsilo.core.files import free_disk, load_tensors, save_tensors
from medsilo.core.package import facts_of
from medsilo.core.tensors import is_finite
from medsilo.federation.evaluation import check_inputs
from medsilo.federation.site_context import SiteContext
from medsilo.learning.compute import Compute, Stop
from medsilo.learning.loop import batches
from medsilo.runs import paths
from medsilo.tasks.shares import PARTS
from medsilo.tasks.site_data import Cases, SiteData, labels_of, names_of, patients_of, records_of

# seconds between two writes of embeddings to disk; a crash loses at most this much computation
PAUSE = 60.0
DIGEST = 32  # bytes of a case's hash
SHARE = 4  # the file of embeddings takes at most 1 / SHARE of the free disk space


@dataclass
class Store:
    """A store of embeddings on a site's disk. The key of each embedding is the hash of the network's input after all
    transforms.
    """

    path: Path
    known: dict[bytes, Tensor] = field(default_factory=dict)
    written: int = 0

    def __post_init__(self) -> None:
        with suppress(
            MedsiloError, FileNotFoundError, KeyError, ValueError
        ):  # if the file of embeddings is missing or incomplete, it is written again
            found, _ = load_tensors(self.path)
            digests, embeddings = found["digests"].numpy(), found["embeddings"].clone()
            self.known = {digest.tobytes(): embedding for digest, embedding in zip(digests, embeddings, strict=True)}
        self.written = len(self.known)

    def write(self) -> None:
        """Write all embeddings to disk if some embeddings are not on the disk yet and the disk has enough space."""
        if len(self.known) == self.written:
            return
        embeddings = torch.stack([*self.known.values()])
        if embeddings.nbytes > free_disk(self.path.parent) / SHARE:
            # the disk has too little space, so the embeddings are not saved, and the next process computes them again
            return
        digests = torch.frombuffer(bytearray(b"".join(self.known)), dtype=torch.uint8).view(-1, DIGEST)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(self.path, {"digests": digests, "embeddings": embeddings})
        self.written = len(self.known)


class Embedded(TensorDataset):
    """The embeddings of the training, validation or test cases, which are computed on first use."""

    def __init__(self, cases: Dataset, make: "Callable[[Dataset, Stop], tuple[Tensor, Tensor]]") -> None:
        self.patients, self.labels = patients_of(cases), labels_of(cases)
        self.names, self.records = names_of(cases), records_of(cases)
        self._size = len(cases)  # type: ignore[arg-type]
        self._cases: Dataset | None = cases
        self._make = make
        self._made: tuple[Tensor, ...] = ()

    def complete(self, stop: Stop = lambda: None) -> None:
        """Compute the missing embeddings, and then remove the images from memory."""
        if self._cases is not None:
            self._made = self._make(self._cases, stop)
            self._cases = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The embeddings with shape [cases, features], and the targets of the cases."""
        self.complete()
        return self._made

    def __len__(self) -> int:
        return self._size


@dataclass
class Embedding:
    context: SiteContext
    compute: Compute
    data: SiteData = field(init=False)

    @classmethod
    def of(cls, context: SiteContext, data: SiteData, compute: Compute) -> Self | None:
        """Return the embeddings of the cases; None if the plan's network has no frozen part whose outputs a site
        saves.
        """
        if not context.plan.network.embedding:
            return None
        for part in PARTS:
            if len(getattr(data, part)):
                check_inputs(part, getattr(data, part), context.plan.task.shape)
        made = cls(context, compute)
        train, validation, test = (Embedded(getattr(data, part), partial(made._of_part, part)) for part in PARTS)
        made.data = replace(data, train=train, validation=validation, test=test)
        return made

    def complete(self, stop: Stop) -> None:
        for part in PARTS:
            getattr(self.data, part).complete(stop)
        # once all embeddings are computed, the network that computed them is no longer needed
        self.__dict__.pop("_module", None)

    @cached_property
    def _module(self) -> nn.Module:
        plan = self.context.plan
        return plan.network.settled(plan.network.build(plan.task.channels, plan.task.goal.outputs), self.compute)

    @cached_property
    def _store(self) -> Store:
        plan, source = self.context.plan, self.context.settings.data
        folder = (source.cache_folder if source else None) or self.context.folder
        code = [facts_of(name)["hash"] for name in sorted(plan.own_packages)]
        told = [plan.network.embedding, self.compute.description, self.compute.threads, torch.__version__, code]
        key = hashlib.sha256(json.dumps([*told, self.context.site]).encode()).hexdigest()
        return Store(folder / paths.EMBEDDINGS.format(key[:16]))

    def _of_part(self, part: str, cases: Dataset, stop: Stop) -> tuple[Tensor, Tensor]:
        if not len(cases):  # type: ignore[arg-type]
            return torch.empty(0, 0), torch.empty(0, dtype=torch.long)
        found: list[Tensor] = []
        targets: list[Tensor] = []
        store, saved = self._store, time.monotonic()
        with self.compute.reproducible(0):
            for inputs, target in batches(cases, 1, Compute(workers=self.compute.workers)):
                stop()
                found.append(self._of_case(part, inputs))
                targets.append(target)
                if time.monotonic() - saved > PAUSE:
                    store.write()
                    saved = time.monotonic()
        store.write()
        return torch.stack(found), torch.cat(targets)

    def _of_case(self, part: str, inputs: Tensor) -> Tensor:
        """Return the embedding of one case.

        Args:
            inputs: the case as a batch of shape [1, ...]
        """
        plan, known, key = self.context.plan, self._store.known, _digest(inputs)
        if key not in known:
            check_inputs(part, Cases(inputs, torch.zeros(1), [""]), plan.task.shape)
            with torch.no_grad(), self.compute.cast():
                known[key] = plan.network.embed(self._module, inputs.to(self.compute.device)).float().cpu()[0].clone()
            if not is_finite(known[key]):
                raise MedsiloError(
                    "network: the frozen layers output NaN or infinity for an image; check the image's values and the "
                    "weight file"
                )
        return known[key]


def _digest(inputs: Tensor) -> bytes:
    told = f"{inputs.dtype} {list(inputs.shape)}".encode()
    return hashlib.sha256(told + inputs.contiguous().numpy().tobytes()).digest()
