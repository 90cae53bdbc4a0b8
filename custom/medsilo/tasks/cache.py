"""Cache prepared cases in memory or in files.

A case for which the cache has no space is prepared again at each use. MONAI's cached data sets limit the number of
cases, and write pickle files. This cache instead limits the number of bytes, and writes safetensors files, which are
safe to load.

If the cache is large enough, each image file is read only once, for both the survey and training.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import safetensors
import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from medsilo.core.errors import DataError, MedsiloError
from medsilo.core.files import free_disk, load_facts, load_tensors, save_tensors
from medsilo.learning.partial_labels import marked
from medsilo.tasks.case_index import Entry, files_of
from medsilo.tasks.sources import DataSource

NAMES = ("inputs", "targets")  # names of the tensors in a cache file
# limit on the bytes in the cache folder, which also takes at most a quarter of the free disk space
MOST = 100 << 30
PLACES = "places"  # name of the tensor of voxel positions, which some tasks store in a cache file


class Memory:
    def __init__(self, source: DataSource) -> None:
        self.left = source.cache_memory << 20  # number of bytes that the cache may still use

    def takes(self, *tensors: Tensor) -> bool:
        """Reserve memory for tensors, and return True; return False if too little is left."""
        size = sum(tensor.nbytes for tensor in tensors)
        keeps = size <= self.left
        self.left -= size if keeps else 0
        return keeps


@dataclass(frozen=True)
class Facts:
    """Facts about an image or recording, from which a survey of the data is made."""

    digest: str
    shown: tuple[tuple[int, ...], ...]  # for each case, those labels of the plan that occur in the case
    intensity: tuple[float, float]
    size: tuple[int, ...] = ()  # number of voxels along x, y (and z)
    spacing: tuple[float, ...] = ()
    values: tuple[int, ...] = ()  # the values that occur in the file of the mask
    seconds: float = 0.0  # length of a recording
    # number of a recording's faults: gaps in time, and rows without a value
    gaps: int = 0
    # number of stretches of a recording with one label that are too short for a window
    short: int = 0


FACTS = TypeAdapter(Facts)  # converts lists from JSON to tuples


@dataclass(frozen=True)
class PreparedEntry:
    """The tensors of an image or recording: inputs [cases, C, *grid], and targets. Targets are classes [cases], or
    masks [cases, *grid] in uint8.
    """

    inputs: Tensor
    targets: Tensor
    facts: Facts
    # Positions of some voxels of the structures, [n, 4], as rows (label, z, y, x); None if the image or recording has
    # several cases
    places: Tensor | None = None


class StoredCase:
    """One case of a cache file. Indexing the case reads only the indexed values from the file."""

    def __init__(self, stored: Any, number: int) -> None:
        self.stored, self.number = stored, number

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored.get_shape()[1:])

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        return self.stored[(slice(self.number, self.number + 1), *slices)][0]


Sliced = Tensor | StoredCase


@dataclass
class Cache:
    source: DataSource
    make: Callable[[Entry], PreparedEntry]
    # the task's settings and code, as part of the cache key, so that a change of them makes cached cases invalid
    settings: str
    # number that is added to every label; its bits mark the structures that this hospital did not annotate
    mark: int = 0

    def __post_init__(self) -> None:
        self.memory = Memory(self.source)
        self.room = 0.0  # number of bytes by which the cache folder may still grow
        if folder := self.source.cache_folder:
            taken = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
            self.room = min(MOST - taken, free_disk(folder) / 4)

    def hold(self, entry: Entry) -> "HeldEntry":
        """Prepare an image or recording; if there is space, store the result in memory or in a file."""
        if (known := self.source.facts) is not None:
            key = self._key(entry)
            if key not in known:
                known[key] = self.make(entry).facts
            return HeldEntry(entry, known[key], None, None, self.make, self.mark)
        if self.source.cache_folder:
            return self._in_memory(self._on_disk(entry))
        made = self.make(entry)
        keeps = self.memory.takes(made.inputs, made.targets)
        return HeldEntry(entry, made.facts, made if keeps else None, None, self.make, self.mark)

    def _in_memory(self, entry: "HeldEntry") -> "HeldEntry":
        if entry.file is None:
            return entry
        kept = {name: tensor.clone() for name, tensor in load_tensors(entry.file)[0].items()}
        inputs, targets, places = (kept.get(name) for name in (*NAMES, PLACES))
        assert inputs is not None and targets is not None
        if not self.memory.takes(inputs, targets):
            return entry
        return replace(entry, made=PreparedEntry(inputs, targets, entry.facts, places), file=None)

    def _on_disk(self, entry: Entry) -> "HeldEntry":
        assert self.source.cache_folder is not None
        path = self.source.cache_folder / f"{self._key(entry)}.safetensors"
        try:
            facts = FACTS.validate_python(load_facts(path)) if path.exists() else None
        except MedsiloError:
            facts = None  # the cache file is incomplete, so the image or recording is prepared again
        if facts is None:
            made = self.make(entry)
            facts = made.facts
            self.room -= made.inputs.nbytes + made.targets.nbytes
            if self.room < 0:  # the cache folder is full, so the image or recording is prepared again at each use
                return HeldEntry(entry, facts, None, None, self.make, self.mark)
            kept = dict(zip(NAMES, (made.inputs, made.targets), strict=True))
            if made.places is not None:
                kept[PLACES] = made.places
            save_tensors(path, kept, asdict(facts))
        return HeldEntry(entry, facts, None, path, self.make, self.mark)

    def _key(self, entry: Entry) -> str:
        """Return a cache key that depends on the files of an image or recording, and on the task's settings and
        code.
        """
        images = [*entry.images, *([entry.label] if isinstance(entry.label, Path) else [])]
        try:
            files = [file for image in images for file in files_of(image)]
            states = [(file, file.stat()) for file in files]
            known = [[str(file.resolve()), state.st_size, state.st_mtime_ns] for file, state in states]
        except OSError as error:
            raise DataError("a file can't be read; is it a link to a missing file?", str(error)) from error
        return hashlib.sha256(json.dumps([known, entry.name, str(entry.label), self.settings]).encode()).hexdigest()


@dataclass(frozen=True)
class HeldEntry:
    """The cases of one image or recording: in memory, in a cache file, or prepared again at each use."""

    entry: Entry
    facts: Facts
    made: PreparedEntry | None
    file: Path | None
    make: Callable[[Entry], PreparedEntry] = field(repr=False)
    mark: int = 0  # number that is added to every label; its bits mark structures that this hospital did not annotate

    def case(self, number: int) -> tuple[Tensor, Tensor]:
        inputs, targets, _ = self.kept(number)
        return inputs, marked(targets if targets.is_floating_point() else targets.long(), self.mark)

    @contextmanager
    def opened(self, number: int) -> Iterator[tuple["Sliced", "Sliced", Tensor | None]]:
        """Yield the tensors of one case; a tensor in a cache file is read only at the indices that the caller uses."""
        if self.file is None:
            made = self.made or self.make(self.entry)
            yield made.inputs[number], made.targets[number], made.places
            return
        with safetensors.safe_open(self.file, framework="pt") as file:
            inputs, targets = (StoredCase(file.get_slice(name), number) for name in NAMES)
            yield inputs, targets, file.get_tensor(PLACES).clone() if PLACES in file.keys() else None  # noqa: SIM118 - no dict

    def kept(self, number: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return three tensors of one case: the input, the target, and voxel positions of its structures (or None)."""
        with self.opened(number) as (*case, places):
            # copy the tensors, because they must outlive the memory-mapped file
            inputs, targets = (one[()].clone() if isinstance(one, StoredCase) else one for one in case)
            return inputs, targets, places


class ReadyCases(Dataset):
    """The cases of one part of a site's data (training, validation or test). All cases of an image or recording are
    consecutive.
    """

    def __init__(self, entries: Sequence[HeldEntry], chosen: Sequence[Sequence[int]]) -> None:
        self.held, self.chosen = entries, chosen
        self.ends = list(accumulate(map(len, chosen)))
        self.patients = tuple(entry.entry.patient for entry, cases in zip(entries, chosen, strict=True) for _ in cases)

    @property
    def records(self) -> tuple[str, ...]:
        """For each case, the name of the image or recording that contains the case."""
        return tuple(one.entry.name for one, cases in zip(self.held, self.chosen, strict=True) for _ in cases)

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each case: the name of its image or recording, and its index within it."""
        numbers = (number for cases in self.chosen for number in cases)
        return tuple(f"{record}\x1f{number}" for record, number in zip(self.records, numbers, strict=True))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @property
    def labels(self) -> Tensor | None:
        """The class of every case, [cases], or None if targets are not classes."""
        pairs = zip(self.held, self.chosen, strict=True)
        shown = [one.facts.shown[case] for one, cases in pairs for case in cases]
        return torch.tensor([own[0] for own in shown], dtype=torch.long) if all(shown) else None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        held, number = self.at(index)
        return held.case(number)

    def at(self, index: int) -> tuple[HeldEntry, int]:
        """Return the image or recording of a case, and the index of the case within it."""
        place = bisect_right(self.ends, index)
        return self.held[place], self.chosen[place][index - (self.ends[place - 1] if place else 0)]


def held_case(cases: Dataset, index: int) -> tuple[HeldEntry, int]:
    """Return the image or recording of a case, and the index of the case within it."""
    if isinstance(cases, ReadyCases):
        return cases.at(index)
    if isinstance(cases, ConcatDataset):
        part = bisect_right(cases.cumulative_sizes, index)
        return held_case(cases.datasets[part], index - [0, *cases.cumulative_sizes][part])
    assert isinstance(cases, Subset)
    return held_case(cases.dataset, cases.indices[index])
