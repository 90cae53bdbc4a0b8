"""Promises about a hospital's records: a study offers, a hospital demands, and of both the stricter holds."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from medsilo.core.section import Section
from medsilo.privacy.mechanisms import Reason

Unit: TypeAlias = Literal["record", "patient"]
Epsilon = Annotated[float, Field(gt=0, le=1000)]
Delta = Annotated[float, Field(ge=1e-12, le=0.1)]
# What may leave beside tensors: numbers of cases; losses and scores over a part of the cases.
Told: TypeAlias = Literal["counts", "train", "validation", "test"]


class Promise(Section):
    """A promise of one study: (ε, δ) for each unit, against everybody outside the hospital."""

    epsilon: Epsilon
    delta: Delta
    unit: Unit = "record"


class Demands(Section):
    """`privacy` in a hospital's medsilo.yaml: what it demands of every study, and of all together."""

    epsilon: Epsilon = Field(description="ε that all studies on the same data may cost together")
    delta: Delta = Field(description="δ at which that ε is counted; less than 1 / number of patients")
    study_epsilon: Epsilon | None = Field(None, description="ε that one study may cost; null: all that is left")
    unit: Unit = Field("patient", description="whom it protects: a patient with all cases, or a single record")
    public: dict[Told, Reason] = Field(
        {},
        description="what this hospital declares public, each with the reason: it costs nothing then. `counts`: "
        "numbers of cases and of patients; `train`, `validation`, `test`: scores and losses over these cases",
    )


def stricter(offer: Promise, demands: Demands | None) -> Promise:
    """Return what holds where a study offers this and a hospital demands that: of each the stricter."""
    if demands is None:
        return offer
    most = demands.epsilon if demands.study_epsilon is None else min(demands.epsilon, demands.study_epsilon)
    unit: Unit = "patient" if "patient" in (offer.unit, demands.unit) else "record"
    return Promise(epsilon=min(offer.epsilon, most), delta=min(offer.delta, demands.delta), unit=unit)
