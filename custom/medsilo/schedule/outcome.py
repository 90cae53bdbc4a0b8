"""Define how a study ends: with one model for all hospitals, or with personal models."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel
from torch import nn

from medsilo.core.errors import Refused
from medsilo.core.tensors import Modules
from medsilo.schedule.phase import Facts, Phase, ServerSide

if TYPE_CHECKING:  # used at sites only
    from medsilo.schedule.site_end import SiteEnd

Part = Literal["validation", "test"]


@dataclass(frozen=True)
class ServerEnd:
    """The server's data with which a method makes its outcome."""

    plan: Any
    layout: Modules  # the networks on torch's meta device
    server: ServerSide
    folder: Path  # the folder of the run's results


class Outcome:
    """How a method ends a study: the final models, their delivery to the sites, and the server's summary.

    `personal`: whether each site ends with a personal model, and selects its best round itself. `common`: the name of
    the shared network, which the lead gets. `for_others`: whether evaluation sites can use the outcome. `one_network`:
    whether a single network predicts instead of an ensemble.

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
        """The number of additional validation scores that a site sends after the delivery."""
        return 0

    def delivery(self, last: Phase) -> Phase:
        """Return the phase that determines the delivered tensors; by default the study's last phase."""
        return last

    def disclosure_notes(self) -> Sequence[str]:
        """Return the outcome's lines in the hospitals' disclosure report."""
        return ()

    # At the server
    def delivery_facts(self, end: ServerEnd, site: str) -> Facts:
        """Return facts that the server sends to a site with the delivery."""
        return {}

    def read(self, answer: Any, part: Part, suppressed: bool, sites: Collection[str], cases: int) -> BaseModel | None:
        """Validate a site's facts about the outcome after the delivery ("validation") or the test; raises Refused.

        suppressed: whether the part has too few cases for any number. cases: the number of cases in the part.
        """
        if answer is not None:
            raise Refused("unexpected field: outcome; this method has none")
        return None

    def conclude(self, end: ServerEnd, answers: Mapping[str, Any]) -> tuple[Facts, Facts]:
        """Make the outcome from the sites' answers to the delivery. Returns facts for the summary, and facts to send to
        the sites before the test."""
        return {}, {}

    def finalize(self, details: Facts, answers: Mapping[str, Any]) -> Facts:
        """Return the summary's details, completed by the sites' answers to the test."""
        return details

    # At a site
    def take(self, end: "SiteEnd", told: Facts) -> Facts | None:
        """Use the delivered tensors at a site, and return facts for the server."""
        return None

    def tested(self, end: "SiteEnd", model: nn.Module, told: Facts) -> nn.Module:
        """Return the model to test; by default the selected model."""
        return model

    def after_test(self, end: "SiteEnd", model: nn.Module) -> Facts | None:
        """Return facts that a site sends to the server besides its test scores."""
        return None


@dataclass(frozen=True)
class OneModel(Outcome):
    """All sites end with the same model; the best round has the highest mean validation score.

    >>> OneModel().common, OneModel().personal
    ('model', False)
    """

    common: str | None = "model"
    personal: bool = False
    for_others: bool = True


@dataclass(frozen=True)
class OwnModels(Outcome):
    """Each site ends with a personal model; `common` is a further network that they share."""

    common: str | None = None
    personal: bool = True
    for_others: bool = False
