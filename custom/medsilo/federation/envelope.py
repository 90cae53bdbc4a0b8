"""The form in which tensors reach and leave a site: the inner seam where secure aggregation is.

It is inside of a round, where what is sealed can still be refused before anything of it is kept, and where a personal
model is moved from the site's own: no layer around the site sees that.
"""

from typing import Any

from medsilo.core.errors import Refused
from medsilo.core.tensors import Groups, Modules
from medsilo.course.phase import Phase
from medsilo.runs.messages import Request


class Envelope:
    """Tensors in clear."""

    keeps_at_home = False  # whether groups that a site can make by itself are not sent to it

    def letter(self, asked: Request, groups: Groups) -> dict[str, Any]:
        """Answer a letter that is no round."""
        raise Refused("the server seals what this plan lets leave in clear")

    def open(self, asked: Request, groups: Groups, modules: Modules) -> Groups:
        """Return what came, with what only this site or all hospitals can read opened."""
        return groups

    def check(self, asked: Request, phase: Phase, modules: Modules) -> None:
        """Raise Refused, before anything is kept, where numbers that would be sent can't be."""

    def seal(self, asked: Request, phase: Phase, groups: Groups, samples: int) -> Groups:
        """Return what is sent. samples: the training cases that it rests on, as the site tells them."""
        return groups
