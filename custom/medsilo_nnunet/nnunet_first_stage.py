"""The first stage of nnU-Net's cascade: a finished study's model, known by its hash, and the labels that it finds.

The plan names the model by the SHA-256 of its tensors. Each hospital looks for it among the studies that it keeps, so
nothing of it travels. What is found of a hospital's cases stays there.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors
import torch
from torch import Tensor, nn

from medsilo.extend import TYPES, Compute, Entry, MedsiloError, Network, hash_of, is_finite, load_tensors
from medsilo_nnunet.nnunet_parts import NnUNetParts

KINDS = ("best.safetensors", "global/best.safetensors", "sites/*/best.safetensors")  # models in a run's folder
HEADER = 1 << 20  # bytes that names and shapes of the tensors may take in a file
UNKNOWN = "it has other tensors than the network of 3d_lowres in the plans; give that of the finished study"


@dataclass
class FirstStage:
    """A model of 3d_lowres, and what it finds in cases that the second stage learns from or is used on."""

    parts: NnUNetParts  # of 3d_lowres
    network: Network
    outputs: int
    wanted: str  # SHA-256 of the model's tensors
    mirror: bool
    given: Path | None  # the finished study's folder or its model, where the site says it
    finished: Path | None  # else the folder in which all its studies are
    compute: Compute = field(default_factory=Compute)
    _found: dict[tuple[str, ...], bytes] = field(default_factory=dict, repr=False)  # packed: mostly background

    @cached_property
    def model(self) -> nn.Module:
        """The model, wherever it is kept here; raises MedsiloError where it isn't."""
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn, only to be replaced
            built = self.network.build(self.parts.read_channels, self.outputs)
        wanted = built.state_dict()
        for path in _kept(self.given) if self.given else _studies(self.finished):
            try:
                tensors = read_model(path, wanted)
            except MedsiloError as error:
                if self.given == path:
                    raise MedsiloError(f"data.first_stage: {error}", error.private) from error
                continue
            if hash_of(tensors) == self.wanted:
                built.load_state_dict(tensors)
                return built.eval().to(self.compute.device)
        raise MedsiloError(
            f"the first stage's model (SHA-256 {self.wanted[:12]}...) is not here; set data.first_stage in this site's "
            "medsilo.yaml to the finished study's folder or its best.safetensors"
        )

    def in_image(self, values: np.ndarray, notes: Mapping[str, Any]) -> Tensor:
        """Return the label of each place of an image as nnU-Net reads it, as its predictor writes them."""
        own = dict(notes)
        return self.parts.labels_back(self._output(self.parts.on_its_grid(values, own)), own)

    def in_case(self, entry: Entry, shape: Sequence[int]) -> Tensor:
        """Return the labels in a case on the second stage's grid, [*shape], as nnU-Net's validation writes them."""
        key = tuple(map(str, (*entry.images, entry.label)))
        if key not in self._found:
            image, _, notes = self.parts.prepared(entry.images, cast(Path, entry.label))
            labels = self.parts.labels_for_next(self._output(image), notes, shape)
            self._found[key] = zlib.compress(labels.to(torch.int16).numpy().tobytes(), 1)
        kept = np.frombuffer(bytearray(zlib.decompress(self._found[key])), np.int16)
        return torch.from_numpy(kept).reshape(tuple(shape))

    def _output(self, image: Tensor) -> Tensor:
        model = self.model
        with torch.inference_mode(), self.compute.reproducible(0):
            return self.parts.inferred(model, image.to(self.compute.device), self.mirror).cpu()


def read_model(path: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors; raises MedsiloError, before any is read, where names, types or shapes are others."""
    try:
        if path.stat().st_size > sum(tensor.nbytes for tensor in wanted.values()) + HEADER:
            raise MedsiloError(UNKNOWN)
        with safetensors.safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no dict
            known = {name: (own.get_dtype(), tuple(own.get_shape())) for name, own in slices.items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise MedsiloError("it can't be read; give a model that medsilo kept (.safetensors)", str(error)) from error
    if known != {name: (TYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in wanted.items()}:
        raise MedsiloError(UNKNOWN)
    tensors, _ = load_tensors(path)
    if not all(map(is_finite, tensors.values())):
        raise MedsiloError("it has numbers that are NaN or infinite; give that of the finished study")
    return tensors


def _kept(given: Path) -> Iterator[Path]:
    """Yield the models of a run's folder, or the file itself."""
    if not given.is_dir():
        yield given
        return
    for kind in KINDS:
        yield from sorted(given.glob(kind))


def _studies(folder: Path | None) -> Iterator[Path]:
    """Yield the models of all studies in a folder."""
    for run in sorted(folder.iterdir()) if folder and folder.is_dir() else ():
        if run.is_dir():
            yield from _kept(run)
