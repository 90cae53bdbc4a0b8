"""The server's interface to its sites: a channel asks them. All that is optional wraps one.

A layer around a channel is a channel (server_stack.py has their order).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from medsilo.core.errors import Lacks, MedsiloError, Passing
from medsilo.core.text import plain
from medsilo.runs.messages import StudyMessage

Outgoing = Callable[[str], StudyMessage]
Receive = Callable[[str, StudyMessage], None]

LONGEST_REASON = 400  # bytes, as of a warning; a site's own log has the rest


@dataclass(frozen=True)
class Missing:
    """The reason why a site is missing from a round.

    >>> Missing("lost", "no answer in time").text
    'lost: no answer in time'
    """

    kind: Literal["refused", "lost"]
    reason: str
    passing: bool = False  # whether asking again may succeed
    lacks: bool = False  # whether the site lacks files of the network that the server can send
    # Of a site in this process: the error itself, whose traceback a program may want.
    error: MedsiloError | None = field(default=None, compare=False, repr=False)

    @property
    def text(self) -> str:
        """The kind of failure and its reason."""
        return f"{self.kind}: {self.reason}"

    @classmethod
    def refused(cls, error: MedsiloError) -> "Missing":
        """Make a rejection from an error; its text may come from a site, and appears on pages."""
        return cls("refused", plain(str(error), LONGEST_REASON), isinstance(error, Passing), isinstance(error, Lacks))


class Channel(Protocol):
    """The server's side of the line to the sites. Layers wrap one, and are one.

    >>> class Counting:  # a layer
    ...     def __init__(self, inner: Channel) -> None:
    ...         self.inner, self.asked = inner, 0
    ...     def ask(self, sites, outgoing, receive, timeout):
    ...         self.asked += len(sites)
    ...         return self.inner.ask(sites, outgoing, receive, timeout)
    """

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        """Ask all these sites at once; `receive` raises Refused for an answer that must not count.

        Returns the sites without an accepted answer. `outgoing` may be called more than once and changes nothing.
        """


class Transport(Channel, Protocol):
    """The innermost channel, which moves messages."""

    def pause(self, seconds: float) -> None:
        """Wait; raises Aborted when the run should stop."""
