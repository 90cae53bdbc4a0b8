"""Select a site's best model by the site's own validation score."""

from medsilo.core.tensors import Tensors
from medsilo.federation.disclosure import Disclosure
from medsilo.federation.raw_results import ExactScores
from medsilo.federation.site_context import SiteContext
from medsilo.federation.site_state import SiteState
from medsilo.runs import paths


class OwnChoice:
    """Saves the model with the best validation score, if the plan lets each site end with its own model."""

    def __init__(self, context: SiteContext, state: SiteState, disclosure: Disclosure) -> None:
        self.context, self.state, self.disclosure = context, state, disclosure

    @property
    def chooses(self) -> bool:
        """True if this site selects the model to test, and False if the server selects it."""
        plan = self.context.plan
        return plan.algorithm.outcome.personal and plan.model_selection.keep == "best"

    def consider(self, rounds: int, scored: ExactScores, model: Tensors | None = None) -> None:
        """If this site selects its own model, and the scored model is the best so far, save this model."""
        rank = self.disclosure.rank(rounds, scored)
        usable = self.chooses and self.context.plan.course.used_as_scored(rounds)
        if usable and (self.state.best is None or rank > self.state.best):
            self.state.best = rank
            self.state.save_model(paths.BEST, rounds, model)

    def scored_late(self, rounds: int) -> ExactScores | None:
        """If the site can score the received model only after training, return the scores. By default, return None."""
        return None
