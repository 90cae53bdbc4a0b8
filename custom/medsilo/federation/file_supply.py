"""Files that a plan's network begins with: a site says that it lacks one, and the server sends it, once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from medsilo.core import model_folders, weight_cache
from medsilo.core.errors import Lacks, MedsiloError, Refused
from medsilo.core.mmap_store import bytes_of
from medsilo.runs.messages import FILES, PIECE, StudyMessage

if TYPE_CHECKING:  # neither side loads the other's
    from medsilo.federation.channel import Channel, Missing, Outgoing, Receive
    from medsilo.federation.site_context import Site, SiteContext
    from medsilo.learning.compute import Stop


class SuppliedSite:
    """A site that has its network's files before anything else of it is made.

    A file travels as tensors of bytes. Its hash stands in the plan: nobody is
    believed.
    """

    def __init__(self, place: "SiteContext", make: "Callable[[], Site]") -> None:
        """make: makes the site behind this one, which reads the files."""
        self.place, self.make = place, make
        self.inner: Site | None = None
        model_folders.look_in(place.models)

    def answer(self, parcel: StudyMessage, stop: "Stop") -> StudyMessage:
        order = take_files(self.place, parcel)
        self.inner = self.inner or self.make()
        return self.inner.answer(order, stop)


def take_files(place: "SiteContext", parcel: StudyMessage) -> StudyMessage:
    """Keep the files that came with an order, and return the rest of it; raises Lacks where one is still missing."""
    groups, wanted = dict(parcel.groups), place.plan.network.files
    came = groups.pop(FILES, {})
    for file in {name.partition(".")[0] for name in came}:
        pieces = [came.get(f"{file}.{number}") for number in range(len(came))]
        found = [own for own in pieces if own is not None]
        if file not in wanted or not found or any(own.dtype is not torch.uint8 or own.ndim != 1 for own in found):
            raise Refused("the server sends a file that the plan does not name")
        weight_cache.keep(file, bytes_of(torch.cat(found)), place.models)
    for file, size in wanted.items():
        try:
            weight_cache.find(file, size)
        except MedsiloError as error:
            raise Lacks(str(error)) from error
    return replace(parcel, groups=groups)


class FileSupply:
    """A channel that sends a site what it lacks: each site once, as the server had it."""

    def __init__(self, inner: "Channel", files: Mapping[str, int]) -> None:
        self.inner, self.files = inner, files
        self.sent: set[str] = set()

    def ask(
        self, sites: Sequence[str], outgoing: "Outgoing", receive: "Receive", timeout: float
    ) -> "Mapping[str, Missing]":
        missing = self.inner.ask(sites, outgoing, receive, timeout)
        lacking = sorted(site for site, gone in missing.items() if gone.lacks and site not in self.sent)
        if not lacking:
            return missing
        self.sent |= set(lacking)
        kept = {file: (str(weight_cache.find(file, size)), size) for file, size in self.files.items()}
        files = {  # their bytes stay on the disk until they are sent
            f"{file}.{number}": piece
            for file, (path, size) in kept.items()
            for number, piece in enumerate(torch.from_file(path, False, size, dtype=torch.uint8).split(PIECE))
        }

        def going(site: str) -> StudyMessage:
            order = outgoing(site)
            return replace(order, groups={**order.groups, FILES: files})

        again = self.inner.ask(lacking, going, receive, timeout)
        return {**{site: gone for site, gone in missing.items() if site not in lacking}, **again}
