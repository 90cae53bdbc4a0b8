"""The bases of all that is optional in a plan: features, and layers around its sites and the server's channel."""

from collections.abc import Sequence
from typing import Any

from medsilo.core.section import Feature
from medsilo.privacy.mechanisms import Charge


class Layer(Feature):
    """A layer of a study: its keys in the plan are its fields, and all that it does is in this one class.

    A study calls the same object at the server and at every site, so it holds its numbers and no state; state lies in
    what `site` and `server` return.

    >>> class Silent(Layer):
    ...     name: str = "silent"
    >>> Silent().site("a site", place=None)
    'a site'
    """

    name: str

    def charges(self, task: str, number: int) -> Sequence[Charge]:
        """Return what this layer makes an answer to a task, in a round, cost on a hospital's ledger."""
        return ()

    def site(self, inner: Any, place: Any) -> Any:
        """Return a site that stands around another (`answer(parcel, stop)`); place says which hospital it is."""
        return inner

    def server(self, inner: Any, plan: Any) -> Any:
        """Return a channel that stands around another (`ask(sites, outgoing, receive, timeout)`, `pause(seconds)`)."""
        return inner
