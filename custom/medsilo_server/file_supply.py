"""Send a site the files of initial weights that the plan's network needs and that the site lacks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from medsilo.core import weight_cache
from medsilo.exchange.channel import Channel, Missing, Outgoing, Receive
from medsilo.runs.messages import FILES, PIECE, StudyMessage


class FileSupply:
    """A channel that sends the network's files of initial weights to each site that lacks them, at most once to the
    same site.
    """

    def __init__(self, inner: Channel, files: Mapping[str, int]) -> None:
        self.inner, self.files = inner, files
        self.sent: set[str] = set()

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        missing = self.inner.ask(sites, outgoing, receive, timeout)
        lacking = sorted(site for site, gone in missing.items() if gone.lacks and site not in self.sent)
        if not lacking:
            return missing
        self.sent |= set(lacking)
        kept = {file: (str(weight_cache.find(file, size)), size) for file, size in self.files.items()}
        files = {  # with memory mapping, the files are read from the disk only when they are sent
            f"{file}.{number}": piece
            for file, (path, size) in kept.items()
            for number, piece in enumerate(torch.from_file(path, False, size, dtype=torch.uint8).split(PIECE))
        }

        def going(site: str) -> StudyMessage:
            order = outgoing(site)
            return replace(order, groups={**order.groups, FILES: files})

        again = self.inner.ask(lacking, going, receive, timeout)
        return {**{site: gone for site, gone in missing.items() if site not in lacking}, **again}
