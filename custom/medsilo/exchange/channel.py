"""Define the interface through which the server sends requests to the sites.

Each optional feature is a layer: a channel that wraps another channel. The module server_stack.py lists the layers
around the channel in order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from medsilo.core.errors import MedsiloError, TemporaryRefusal, WeightsMissing
from medsilo.core.text import plain
from medsilo.runs.messages import StudyMessage

Outgoing = Callable[[str], StudyMessage]
Receive = Callable[[str, StudyMessage], None]

LONGEST_REASON = 400  # limit on the bytes of a reason or warning; the site's log contains the full text


@dataclass(frozen=True)
class Missing:
    """The reason why a site is missing from a round.

    >>> Missing("lost", "no answer in time").text
    'lost: no answer in time'
    """

    kind: Literal["refused", "lost"]
    reason: str
    passing: bool = False  # whether a repetition of the rejected request may succeed
    lacks: bool = False  # whether the site lacks files of the network, so that the server should send these files
    # If the site runs in the server's process, the error object with its traceback.
    error: MedsiloError | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        return f"{self.kind}: {self.reason}"

    @classmethod
    def refused(cls, error: MedsiloError) -> "Missing":
        """Convert a site's error to a reason, and remove control characters that the site may have put into the error's
        text.
        """
        return cls(
            "refused",
            plain(str(error), LONGEST_REASON),
            isinstance(error, TemporaryRefusal),
            isinstance(error, WeightsMissing),
        )


class Channel(Protocol):
    """The server's connection to the sites. Each layer of a channel wraps another channel, and is itself a channel.

    >>> class Counting:  # a layer
    ...     def __init__(self, inner: Channel) -> None:
    ...         self.inner, self.asked = inner, 0
    ...     def ask(self, sites, outgoing, receive, timeout):
    ...         self.asked += len(sites)
    ...         return self.inner.ask(sites, outgoing, receive, timeout)
    """

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        """Send requests to all given sites at once.

        Args:
            sites: the sites' names
            outgoing: a function that returns the request to a site; it may be called several times for one site, so it
                must change no state
            receive: a function that takes a site's name and answer, and raises Refused for an answer that the server
                must ignore
            timeout: seconds that a site has for its answer

        Returns the sites without an accepted answer, each with the reason.
        """


class Transport(Channel, Protocol):
    """The innermost channel, which has no layers inside and transports messages."""

    def pause(self, seconds: float) -> None:
        """Wait for some seconds. Raises Aborted if the run should stop."""
