"""The seam for buttons that packages add to a plan on a hospital's page."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PageAction:
    """A button beside a plan on the hospital's page: files to download. It is an entry point `medsilo.page_actions`.

    >>> PageAction("Write a note", "It sends nothing.", lambda kit, plan: {"note.txt": plan.encode()}).title
    'Write a note'
    """

    title: str
    says: str  # what it does, and what it reads
    files: Callable[[Path, str], Mapping[str, bytes]]  # by name, of a kit's folder and the hash of a plan that asked
