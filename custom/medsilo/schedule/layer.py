"""The base of a plan's layers, which stand around its sites and the server's channel."""

from collections.abc import Mapping
from typing import Any

from medsilo.core.section import Feature


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

    def charges(self, task: str, number: int) -> Mapping[str, float]:
        """Return what this layer lets out with normal noise in an answer to a task, in a round, for the hospital's
        ledger: by its name there, the noise's standard deviation over the most that one unit's data change it."""
        return {}

    def site(self, inner: Any, place: Any) -> Any:
        """Return a site that wraps another (`answer(parcel, stop)`); place says which hospital it is."""
        return inner

    def server(self, inner: Any, plan: Any) -> Any:
        """Return a channel that wraps another (`ask(sites, outgoing, receive, timeout)`, `pause(seconds)`)."""
        return inner
