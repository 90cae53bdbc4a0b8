"""The bases of all that is optional in a plan: features, and layers around its sites and the server's channel."""

from collections.abc import Iterable, Sequence
from typing import Any

from medsilo.core.section import Section
from medsilo.core.tensors import Modules
from medsilo.privacy.mechanisms import Charge


class Feature(Section):
    """A part of a plan that nobody needs: it says itself what it can't stand beside, and what it lets leave.

    `plan` is a `medsilo.Plan`; `networks` are those of its method, without values. Plans and leak reports ask every
    feature and name none.
    """

    def conflicts(self, plan: Any, networks: Modules) -> Iterable[str]:
        """Yield why the plan can't have this: where, what, and what to do instead."""
        return ()

    def cautions(self, plan: Any) -> Iterable[str]:
        """Yield what the person who starts the study should know."""
        return ()

    def leaves(self, plan: Any) -> Iterable[str]:
        """Yield lines of the leak report: what leaves a hospital through this, or is changed by it."""
        return ()


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
