"""Patients as cases, each with several windows: none of them counts for more than one."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medsilo.learning.seeds import seed_for
from medsilo.tasks.task import patients_of


class Subjects(Dataset):
    """The patients of a data set of windows: inputs [windows, signals, steps], and the target that all of them have.

    Where a patient has fewer windows than another of the part, the rest is NaN.
    """

    def __init__(self, data: Dataset, most: int) -> None:
        self.data, self.places = data, places_of(data, most)
        self.patients = tuple(self.places)
        self.longest = max(map(len, self.places.values()), default=0)
        known = [self.data[places[0]][1] for places in self.places.values()]
        self.targets = torch.stack(known) if known else torch.zeros(0, 2)

    def __len__(self) -> int:
        return len(self.patients)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        windows = torch.stack([self.data[place][0] for place in self.places[self.patients[index]]])
        whole = windows.new_full((self.longest, *windows.shape[1:]), torch.nan)
        whole[: len(windows)] = windows
        return whole, self.targets[index]


def places_of(data: Dataset, most: int) -> dict[str, list[int]]:
    """Return where each patient's windows are; of more than so many, as many that lie evenly."""
    found: dict[str, list[int]] = {}
    for place, patient in enumerate(patients_of(data)):
        found.setdefault(patient, []).append(place)
    return {
        patient: places if len(places) <= most else [places[n * len(places) // most] for n in range(most)]
        for patient, places in found.items()
    }


def drawn_window(windows: Tensor, seed: int) -> Tensor:
    """Return one window of a patient, [signals, steps], drawn from the seed alone."""
    return windows[seed_for(seed, "window") % int(_known(windows).sum())]


def of_subjects(network: Callable[[Tensor], Tensor], inputs: Tensor, at_once: int) -> Tensor:
    """Return the mean of a network's output over each patient's windows, [patients, windows, signals, steps]."""
    known = _known(inputs)
    output = torch.cat([network(windows) for windows in inputs[known].split(at_once)])
    whole = output.new_zeros((*known.shape, *output.shape[1:]))
    whole[known] = output
    return whole.sum(1) / known.sum(1)[:, None]


def _known(windows: Tensor) -> Tensor:
    """Return which windows are none that only fill up."""
    return ~windows[..., 0, 0].isnan()
