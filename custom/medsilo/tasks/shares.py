"""A plan's words on who is trained on and tested, and on the dealing of one folder to simulated sites."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from medsilo.core.section import Section

Alpha = Annotated[float, Field(ge=1e-3, le=1e6)]  # of a Dirichlet distribution


def as_tuple(value: Any) -> Any:
    """Settings are read strictly, and YAML has lists where these have tuples."""
    return tuple(value) if isinstance(value, list) else value


def _whole(shares: tuple[float, float, float]) -> tuple[float, float, float]:
    if min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError("give three shares above 0 that add up to 1: train, validation and test")
    return shares


Shares = Annotated[tuple[float, float, float], AfterValidator(_whole)]
PARTS = ("train", "validation", "test")


class Partition(Section):
    """The dealing of one folder to simulated sites. A patient's cases go to one site, whole.

    iid: at random, as evenly as can be. dirichlet: by the patients' classes, in shares drawn from Dirichlet(alpha).
    column: the table's `site` column says whose a case is.
    """

    kind: Literal["iid", "dirichlet", "column"] = Field(
        "iid",
        description="at random, by class in shares drawn from a Dirichlet distribution, or by the table's `site` "
        "column",
    )
    alpha: Alpha = Field(0.5, description="of the Dirichlet distribution: the smaller, the more the sites differ")
    minimum: int = Field(3, ge=1, description="patients that every site gets at least")
    seed: int = Field(0, ge=0, lt=2**32, description="another number deals the patients in another way")
