"""The base of every layer that a plan may put around its sites and around the server's channel."""

from collections.abc import Iterable, Sequence
from typing import Any

from medsilo.core.section import Section
from medsilo.privacy.mechanisms import Charge


class Layer(Section):
    """A layer of a study: its keys in the plan are its fields, and all that it does is in this one class.

    A study calls the same object at the server and at every site, so it holds its numbers and no state; state lies in
    what `site` and `server` return. `plan` is a `medsilo.Plan`.
    """

    name: str

    def conflicts(self, plan: Any) -> Iterable[str]:
        """Yield why the plan can't have this layer: what, and what to do instead."""
        return ()

    def leaves(self, plan: Any) -> Iterable[str]:
        """Yield lines of the leak report: what leaves a hospital through this layer, or is changed by it."""
        return ()

    def charges(self, task: str, number: int) -> Sequence[Charge]:
        """Return what this layer makes an answer to a task, in a round, cost on a hospital's ledger."""
        return ()

    def site(self, inner: Any, place: Any) -> Any:
        """Return a site that stands around another (`answer(parcel, stop)`); place says which hospital it is."""
        return inner

    def server(self, inner: Any, plan: Any) -> Any:
        """Return a channel that stands around another (`ask(sites, outgoing, receive, timeout)`, `pause(seconds)`)."""
        return inner
