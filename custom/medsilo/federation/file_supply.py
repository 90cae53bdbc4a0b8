"""Receive files with a network's initial weights: if a site reports that a file is missing, the server sends this file
once.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from medsilo.core import model_folders, weight_cache
from medsilo.core.errors import MedsiloError, Refused, WeightsMissing
from medsilo.core.mmap_store import bytes_of
from medsilo.runs.messages import FILES, StudyMessage

if TYPE_CHECKING:  # the server imports this module, so the module must not import the code of sites at its beginning
    from medsilo.federation.site_context import Site, SiteContext
    from medsilo.learning.compute import Stop


class SuppliedSite:
    """The layer first saves the weight files that the server sends, and only then creates the wrapped site, which reads
    these files.

    The server sends a file as tensors of bytes. The hash of a received file must equal the hash that the plan states
    for the file.
    """

    def __init__(self, context: "SiteContext", make: "Callable[[], Site]") -> None:
        """Wrap a site that does not exist yet; the layer creates the site after all files have arrived.

        Args:
            make: a function that creates the site, which reads the files
        """
        self.context, self.make = context, make
        self.inner: Site | None = None
        model_folders.look_in(context.models)

    def answer(self, message: StudyMessage, stop: "Stop") -> StudyMessage:
        order = take_files(self.context, message)
        self.inner = self.inner or self.make()
        return self.inner.answer(order, stop)


def take_files(context: "SiteContext", message: StudyMessage) -> StudyMessage:
    """Save the files that a request contains, and return the request without these files.

    Raises WeightsMissing if a file that the plan names is still missing.
    """
    groups, wanted = dict(message.groups), context.plan.network.files
    came = groups.pop(FILES, {})
    for file in {name.partition(".")[0] for name in came}:
        pieces = [came.get(f"{file}.{number}") for number in range(len(came))]
        found = [piece for piece in pieces if piece is not None]
        if file not in wanted or not found or any(own.dtype is not torch.uint8 or own.ndim != 1 for own in found):
            raise Refused("the server sends a file that the plan does not name")
        weight_cache.keep(file, bytes_of(torch.cat(found)), context.models)
    for file, size in wanted.items():
        try:
            weight_cache.find(file, size)
        except MedsiloError as error:
            raise WeightsMissing(str(error)) from error
    return replace(message, groups=groups)
