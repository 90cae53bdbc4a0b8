"""Define the base class of a plan's layers, which wrap each site of a study and the server's channel to the sites."""

from collections.abc import Mapping
from typing import Any

from medsilo.core.section import Feature


class Layer(Feature):
    """A section of the plan that changes the messages between the server and the sites.

    A layer object contains only settings, because the server and all sites use the same object. The state of a layer is
    in the objects that wrap sites and the channel.

    >>> class Silent(Layer):
    ...     name: str = "silent"
    >>> Silent().site("a site", context=None)
    'a site'
    """

    name: str

    def charges(self, task: str, number: int) -> Mapping[str, float]:
        """Return the noise multiplier of each value that this layer adds to an answer.

        The keys of the returned mapping are the names of the values in the hospital's privacy ledger. A noise
        multiplier is the noise's standard deviation divided by the value's sensitivity to one privacy unit.

        Args:
            task: the request that the answer belongs to: "round", "deliver" or "test"
            number: index of the round
        """
        return {}

    def site(self, inner: Any, context: Any) -> Any:
        """Return a site that wraps a given site.

        Args:
            inner: the given site, which has the method `answer(message, stop)`
            context: the site's context, a `SiteContext`
        """
        return inner

    def server(self, inner: Any, plan: Any) -> Any:
        """Return a channel that wraps a given channel.

        Args:
            inner: the given channel, which has the methods `ask(sites, outgoing, receive, timeout)` and
                `pause(seconds)`
            plan: the whole plan, a `medsilo.Plan`
        """
        return inner
