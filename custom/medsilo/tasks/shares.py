"""Define the keys of a plan that split patients into training, validation and test, or divide one folder among
simulated sites.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from medsilo.core.section import Section

Alpha = Annotated[float, Field(ge=1e-3, le=1e6)]  # parameter of a Dirichlet distribution


def as_tuple(value: Any) -> Any:
    """Convert a list from YAML to a tuple, because settings are validated strictly."""
    return tuple(value) if isinstance(value, list) else value


def _whole(shares: tuple[float, float, float]) -> tuple[float, float, float]:
    if min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError("give three shares above 0 that add up to 1: train, validation and test")
    return shares


Shares = Annotated[tuple[float, float, float], AfterValidator(_whole)]
PARTS = ("train", "validation", "test")


class Partition(Section):
    """How the cases in one folder are distributed to simulated sites.

    The kind `iid` distributes patients at random; the numbers of patients at two sites differ by at most one.

    The kind `dirichlet` samples, for each class, the sites' fractions of patients from Dirichlet(alpha). With these
    kinds, all cases of a patient go to one site. With the kind `column`, the table's column `site` names the site of
    each case.
    """

    kind: Literal["iid", "dirichlet", "column"] = Field(
        "iid",
        description="`iid`: divide patients at random. `dirichlet`: divide the patients of each class in random "
        "shares. `column`: the table's `site` column names each case's site",
    )
    alpha: Alpha = Field(
        0.5, description="for `dirichlet`: the smaller this number, the more the sites differ in classes"
    )
    minimum: int = Field(3, ge=1, description="minimum number of patients at each site")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the random division among simulated sites")
