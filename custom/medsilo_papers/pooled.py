"""Public sets without hospitals: one pool of cases that every site holds and of which each takes its own."""

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from medsilo.extend import DataError, Task, splits


class PooledTask(Task):
    """The dealing of a pool: by classes, in shares drawn from a Dirichlet distribution.

    Sites take turns in sorted order, and all hold the same folder and the same plan, so that nobody has to tell
    another who has what. The pool is dealt to all sites first and split after that: the part of a patient is the same
    at every site.
    """

    alpha: float = Field(
        default=0.1, gt=0, description="of the Dirichlet distribution: the smaller, the more the sites differ"
    )
    minimum: int = Field(default=40, ge=4, description="cases that every site gets at least")
    split: splits.Split = Field(
        default="patient", description="paper: half of a site's cases train, the other half tests, of whichever patient"
    )
    shares: splits.Shares = Field(
        default=(0.5, 0.2, 0.3), description="train, validation and test; without effect on 'paper'"
    )
    validation: float = Field(
        default=0.1, gt=0, lt=1, description="of the training half; the AdaFed paper has no validation part"
    )

    @property
    def mixes_patients(self) -> bool:
        return self.split == "paper"

    def dealt(
        self, labels: np.ndarray, patients: tuple[str, ...] | np.ndarray, site: str, sites: Sequence[str], seed: int
    ) -> np.ndarray:
        """The part of every case of the pool, [cases]: 0 train, 1 validation, 2 test, -1 another site's.

        patients: [cases] names, or whole numbers that are the parts of a published split.
        """
        dealt = splits.dirichlet(labels, len(sites), self.alpha, seed, self.minimum)
        own = dealt[sorted(sites).index(site)]
        parts = np.full(len(labels), -1)
        if self.split == "paper":
            order = np.random.default_rng(splits.split_seed(seed, site)).permutation(own)
            half = len(own) // 2
            kept = max(1, round(self.validation * half))
            parts[order[:half]], parts[order[:kept]], parts[order[half:]] = 0, 1, 2
        else:
            if not isinstance(patients, np.ndarray):
                patients = splits.parts_by_draw(patients, self.shares, splits.split_seed(seed))
            parts[own] = patients[own]
        sizes = np.bincount(parts[own], minlength=3)
        if not sizes.all():
            told = ", ".join(map(str, sizes))
            raise DataError(
                f"this site got {told} cases for train, validation and test; take fewer sites, a larger task.alpha "
                "or task.minimum, or another seed"
            )
        return parts
