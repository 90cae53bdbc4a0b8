"""Define the outcome of a study: one model for all hospitals, or a personal model for each hospital."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel
from torch import Tensor, nn

from medsilo.core.errors import Refused
from medsilo.core.tensors import Modules
from medsilo.schedule.phase import Facts, Phase, ServerSide

if TYPE_CHECKING:  # imported only for type checkers, because only sites need these modules
    from medsilo.core.rounding import Resolution
    from medsilo.learning.compute import Compute
    from medsilo.tasks.task import Task

Part = Literal["validation", "test"]


@dataclass(frozen=True)
class ServerEnd:
    """The data from which the server creates a method's outcome."""

    plan: Any
    layout: Modules  # the networks on PyTorch's meta device
    server: ServerSide
    folder: Path  # the folder of the run


@dataclass(frozen=True)
class SiteOutcome:
    """The data from which a site creates a method's outcome."""

    plan: Any  # a medsilo.plan.Plan; the package medsilo.schedule can't import medsilo.plan
    site: str
    modules: Modules  # the networks, which contain the delivered tensors
    folder: Path  # the site's folder within the run's folder
    task: "Task"
    compute: "Compute"
    # a function that yields each validation case once, in order
    validation: Callable[[], Iterator[tuple[Tensor, Tensor]]]
    suppressed: Collection[Part]  # the parts of the data (validation or test) that have too few cases to send any score
    resolution: "Mapping[str, Resolution]"  # for each part of the data, the rounding of means and counts
    stop: Callable[[], None]


class Outcome:
    """The outcome of a study: the final models, their delivery to the sites, and facts for the server's summary.

    If an outcome is personal, each site ends with a personal model, and the site selects the best round of its personal
    model. The common network of an outcome is the network that all sites share and that the lead receives. If an
    outcome is "for others", evaluation sites can use the final model. An outcome has one network unless the final model
    is an ensemble of networks.

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
        """How many validation scores a site sends after it receives the final tensors, besides the scores of the
        rounds.
        """
        return 0

    def delivery(self, last: Phase) -> Phase:
        """Return the phase whose tensor groups the server delivers to the sites at the end of the study."""
        return last

    def disclosure_notes(self) -> Sequence[str]:
        return ()

    # At the server
    def delivery_facts(self, end: ServerEnd, site: str) -> Facts:
        """Return facts that the server sends to a site together with the final tensors.

        Args:
            end: the server's data
            site: the site's name
        """
        return {}

    def read(self, answer: Any, part: Part, suppressed: bool, sites: Collection[str], cases: int) -> BaseModel | None:
        """Validate a site's facts about the outcome, or raise Refused for invalid facts.

        Args:
            answer: the facts, or None if the site sent no facts
            part: "validation" if the site answers the delivery of the final tensors, and "test" if the site answers the
                test
            suppressed: whether the site has too few cases in this part, so that it may send no scores
            sites: the names of the training sites
            cases: the site's disclosed number of cases in this part
        """
        if answer is not None:
            raise Refused("unexpected field: outcome; this method has none")
        return None

    def conclude(self, end: ServerEnd, answers: Mapping[str, Any]) -> tuple[Facts, Facts]:
        """Create the outcome after all sites have received the final tensors.

        The method returns facts for the summary, and facts that the server sends to the sites before the test.

        Args:
            end: the server's data
            answers: for each site, the facts in its answer to the delivery
        """
        return {}, {}

    def finalize(self, details: Facts, answers: Mapping[str, Any]) -> Facts:
        """Add facts from the sites' answers to the details of the summary.

        Args:
            details: the summary's details so far
            answers: for each site, the facts in its answer to the test
        """
        return details

    # At a site
    def take(self, end: SiteOutcome, facts: Facts) -> Facts | None:
        """Process the delivered tensors at a site, and return facts that the site sends to the server.

        Args:
            end: the site's data
            facts: the facts that the server sent together with the delivered tensors
        """
        return None

    def tested(self, end: SiteOutcome, model: nn.Module, facts: Facts) -> nn.Module:
        """Return the model that a site tests; by default, this is the selected model.

        Args:
            end: the site's data
            model: the selected model
            facts: the facts that the server sent before the test
        """
        return model

    def after_test(self, end: SiteOutcome, model: nn.Module) -> Facts | None:
        """Return facts that a site sends to the server together with the test scores.

        Args:
            end: the site's data
            model: the tested model
        """
        return None


@dataclass(frozen=True)
class OneModel(Outcome):
    """All sites end with the same model: the model of the round that has the highest mean validation score.

    >>> OneModel().common, OneModel().personal
    ('model', False)
    """

    common: str | None = "model"
    personal: bool = False
    for_others: bool = True


@dataclass(frozen=True)
class OwnModels(Outcome):
    """The outcome in which each site has a personal model. `common` is the name of a second network, which all sites
    share.
    """

    common: str | None = None
    personal: bool = True
    for_others: bool = False
