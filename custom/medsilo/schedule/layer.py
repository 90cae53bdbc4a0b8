"""Define the base class of a plan's layers, which wrap its sites and the server's channel."""

from collections.abc import Mapping
from typing import Any

from medsilo.core.section import Feature


class Layer(Feature):
    """A layer, as a section of the plan, that changes what the server and the sites send each other.

    It has settings only, because the server and all sites call it. The objects that `site` and `server` return hold the
    state.

    >>> class Silent(Layer):
    ...     name: str = "silent"
    >>> Silent().site("a site", place=None)
    'a site'
    """

    name: str

    def charges(self, task: str, number: int) -> Mapping[str, float]:
        """Return the noise multipliers of this layer's releases in an answer, by their names in the hospital's privacy
        ledger.

        A noise multiplier is the noise's standard deviation divided by the release's sensitivity to one privacy unit.
        """
        return {}

    def site(self, inner: Any, place: Any) -> Any:
        """Return a site that wraps another (`answer(message, stop)`). place: the site's context."""
        return inner

    def server(self, inner: Any, plan: Any) -> Any:
        """Return a channel that wraps another (`ask(sites, outgoing, receive, timeout)`, `pause(seconds)`)."""
        return inner
