"""Define a plan's keys that split patients into training, validation and test, and that divide one folder among
simulated sites.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from medsilo.core.section import Section

Alpha = Annotated[float, Field(ge=1e-3, le=1e6)]  # parameter of a Dirichlet distribution


def as_tuple(value: Any) -> Any:
    """Convert a list from YAML to a tuple, because the strict validation of settings accepts only tuples."""
    return tuple(value) if isinstance(value, list) else value


def _whole(shares: tuple[float, float, float]) -> tuple[float, float, float]:
    if min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError("give three shares above 0 that add up to 1: train, validation and test")
    return shares


Shares = Annotated[tuple[float, float, float], AfterValidator(_whole)]
PARTS = ("train", "validation", "test")


class Partition(Section):
    """The method by which the patients in one folder are distributed to simulated sites.

    All cases of a patient go to the same simulated site. The kind `iid` distributes patients at random, so that the
    numbers of patients at two sites differ by at most one.

    The kind `dirichlet` samples, for each class, the sites' fractions of patients from Dirichlet(alpha). With the kind
    `column`, the table's column `site` names the site of each case.
    """

    kind: Literal["iid", "dirichlet", "column"] = Field(
        "iid",
        description="cases are divided at random (`iid`), by class in shares from a Dirichlet distribution "
        "(`dirichlet`), or by the table's `site` column (`column`)",
    )
    alpha: Alpha = Field(
        0.5, description="parameter of the Dirichlet distribution: the smaller, the more the sites differ"
    )
    minimum: int = Field(3, ge=1, description="smallest number of patients at a site")
    seed: int = Field(
        0, ge=0, lt=2**32, description="seed with which the data are divided at random among simulated sites"
    )
