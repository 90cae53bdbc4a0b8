"""Read tensors from another party's checkpoint without running code in the file. The tensors are matched with the
tensors of a network by name and shape.
"""

import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from medsilo.extend import MedsiloError
from medsilo.extend.networks import weight_cache

# keys under which a checkpoint may store its tensors
INSIDE = ("state_dict", "network_weights", "model_state_dict", "model", "net", "ema")
MOST_PREFIXES = 32
# Maximum ratio between the unpacked size and the packed size of an archive. Weights hardly compress, so an archive of
# weights has a small ratio.
MOST_UNPACKED = 20
SHOWN = 3
# NumPy types other than arrays that nnU-Net's checkpoints contain; loading these types runs no code.
NUMBERS: list[Any] = [
    *(np.dtype, np.float64(0).__reduce__()[0]),
    *(type(np.dtype(kind)) for kind in ("float64", "float32", "int64", "int32", "bool")),
]


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file. The supported files are safetensors, MONAI bundles, checkpoints of nnU-Net and
    nnssl, and state dicts.
    """
    try:
        return _tensors_in(path)
    # PyTorch, safetensors and zipfile raise various errors if a file is damaged, unusual or old
    except Exception as error:
        raise MedsiloError(
            "network.from: the file holds no tensors that can be read without running code; give safetensors, or a "
            "state dict that torch.save wrote",
            private=f"{path}: {error}",
        ) from error


def _tensors_in(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                every = archive.namelist()
                inside = [
                    name for ending in weight_cache.IN_BUNDLES for name in every if f"/{name}".endswith(f"/{ending}")
                ]
                if sum(part.file_size for part in archive.infolist()) > MOST_UNPACKED * path.stat().st_size:
                    raise ValueError("weights whose compressed file is suspiciously small")
                if inside:
                    content = archive.read(inside[0])
                    return _of(BytesIO(content), inside[0].endswith(".safetensors"))
        file.seek(8)
        begins = file.read(1)
        file.seek(0)
        return _of(file, begins == b"{")


def _of(file: BinaryIO | BytesIO, is_safe: bool) -> dict[str, Tensor]:
    if is_safe:
        return safetensors.torch.load(file.read())
    with torch.serialization.safe_globals(NUMBERS):
        found: Any = torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251
    for _ in range(2):
        inner = next((found[key] for key in INSIDE if isinstance(found.get(key), Mapping)), None)
        found = inner if inner is not None else found
    tensors = {name: own for name, own in found.items() if isinstance(name, str) and isinstance(own, Tensor)}
    if not tensors:
        raise ValueError("no tensors")
    return tensors


@dataclass(frozen=True)
class Match:
    """The tensors of a file that fit a network, by their names in the network, and the names of all other tensors."""

    matched: Mapping[str, Tensor]
    missing: tuple[str, ...]
    surplus: tuple[str, ...]
    other_shape: tuple[str, ...]
    share: float  # fraction of the network's parameters that the file contains

    def __str__(self) -> str:
        parts = [f"{len(self.matched)} tensors found ({self.share:.0%} of the network's numbers)"]
        for what in ("missing", "surplus", "other_shape"):
            parts.append(counted(what.replace("_", " "), getattr(self, what)))
        return ", ".join(parts)


def counted(noun: str, names: Sequence[str]) -> str:
    shown = f" ({', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''})" if names else ""
    return f"{len(names)} {noun}{shown}"


def match(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Match:
    """Match the tensors of a file with the tensors of a network. If the file's names differ from the network's names
    only in their prefix, the file's prefix is replaced.
    """
    best: dict[str, str] = {}  # maps the names of tensors in the network to their names in the file
    most, added = 0, _prefixes(expected)
    for gone in _prefixes(given):
        rest = {name[len(gone) :]: name for name in given if name.startswith(gone)}
        for more in added:
            mine = [name for name in expected if name.startswith(more) and name[len(more) :] in rest]
            here = {name: rest[name[len(more) :]] for name in mine}
            if (numbers := _numbers(expected, _fitting(expected, given, here))) > most or not best:
                best, most = here, numbers
    fitting = _fitting(expected, given, best)
    return Match(
        {mine: given[best[mine]] for mine in fitting},
        tuple(name for name in expected if name not in best),
        tuple(name for name in given if name not in best.values()),
        tuple(name for name in best if name not in fitting),
        _numbers(expected, fitting) / max(1, _numbers(expected, expected)),
    )


def is_weight(tensor: Tensor, expected: Tensor) -> bool:
    """Return True if a tensor of the file has finite, plain (dense, real, not quantized) values that the network's
    tensor can hold.
    """
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
        return False
    if expected.is_meta or not expected.is_floating_point():
        return True
    return tensor.is_floating_point() and bool(tensor.to(expected.dtype).isfinite().all())


def _fitting(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> list[str]:
    return [mine for mine, theirs in names.items() if expected[mine].shape == tensors[theirs].shape]


def _numbers(tensors: Mapping[str, Tensor], names: Iterable[str]) -> int:
    return sum(tensors[name].numel() for name in names)


def _prefixes(names: Iterable[str]) -> list[str]:
    """Return the possible prefixes of dotted names: the empty prefix, and all prefixes of at most three components."""
    found = {"": None}
    for name in names:
        parts = name.split(".")
        found |= {".".join(parts[:count]) + ".": None for count in (1, 2, 3) if count < len(parts)}
    return sorted(found, key=lambda prefix: (prefix.count("."), prefix))[:MOST_PREFIXES]
