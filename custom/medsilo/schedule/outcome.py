"""The end of a study. The engine knows this interface only; a method says which outcome is its own."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel
from torch import nn

from medsilo.core.errors import Refused
from medsilo.core.tensors import Modules
from medsilo.schedule.phase import Facts, Phase, ServerSide

if TYPE_CHECKING:  # the other side's
    from medsilo.schedule.site_end import SiteEnd

Part = Literal["validation", "test"]


@dataclass(frozen=True)
class ServerEnd:
    """The server, as an outcome finds it."""

    plan: Any
    layout: Modules  # the networks without values
    server: ServerSide
    folder: Path  # the run's


class Outcome:
    """The end of a study: what is delivered, which model is scored, and what the server concludes.

    `personal`: sites end with models of their own, and each chooses its best by itself. `common`: the network that all
    share and that the lead gets. `for_others`: whether hospitals that did not train can use the outcome. `one_network`:
    whether a single network answers, and not several that are put together.

    >>> from medsilo.registry import METHODS
    >>> [(name, METHODS[name]().outcome.personal) for name in ("fedavg", "fedbn")]
    [('fedavg', False), ('fedbn', True)]
    """

    personal: bool
    common: str | None
    for_others: bool
    one_network: ClassVar[bool] = True

    @property
    def scores_besides(self) -> int:
        """Return how many scores over the validation cases are told with the delivery, beside the model's own."""
        return 0

    def delivery(self, last: Phase) -> Phase:
        """Return the phase in which the outcome is delivered; by default that after the last round."""
        return last

    def disclosure_notes(self) -> Sequence[str]:
        """Return what a hospital should know of the outcome, one line each, for the disclosure report."""
        return ()

    # At the server
    def delivery_facts(self, end: ServerEnd, site: str) -> Facts:
        """Return what a site is told with the delivery."""
        return {}

    def read(self, answer: Any, part: Part, suppressed: bool, sites: Collection[str], cases: int) -> BaseModel | None:
        """Check what a site tells after the delivery ("validation") or the test; raises Refused.

        suppressed: whether the part has too few cases to tell anything of them. cases: how many it has.
        """
        if answer is not None:
            raise Refused("unexpected field: outcome; this method has none")
        return None

    def conclude(self, end: ServerEnd, answers: Mapping[str, Any]) -> tuple[Facts, Facts]:
        """Make the outcome of the sites' answers to the delivery; returns facts for the summary's details, and what
        sites are told before the test."""
        return {}, {}

    def finalize(self, details: Facts, answers: Mapping[str, Any]) -> Facts:
        """Return the details with the sites' answers to the test."""
        return details

    # At a site
    def take(self, end: "SiteEnd", told: Facts) -> Facts | None:
        """Take over what was delivered; returns what the server is told of it."""
        return None

    def tested(self, end: "SiteEnd", model: nn.Module, told: Facts) -> nn.Module:
        """Return the model that is tested; by default `model`, the one that was selected in the rounds."""
        return model

    def after_test(self, end: "SiteEnd", model: nn.Module) -> Facts | None:
        """Return what the server is told of the test beside scores."""
        return None


@dataclass(frozen=True)
class OneModel(Outcome):
    """All sites end with the same model; the best is chosen by the mean of their validation scores.

    >>> OneModel().common, OneModel().personal
    ('model', False)
    """

    common: str | None = "model"
    personal: bool = False
    for_others: bool = True


@dataclass(frozen=True)
class OwnModels(Outcome):
    """Every site ends with a model of its own; `common` is one that they share beside it."""

    common: str | None = None
    personal: bool = True
    for_others: bool = False
