"""Questions to all hospitals by a job of their own, before there is a plan."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medsilo.core.errors import Refused
from medsilo.core.text import plain
from medsilo.federation.bounds import Bounds
from medsilo.federation.seams import Channel, Site
from medsilo.registry import INQUIRIES, check_allowed
from medsilo.runs.messages import Message
from medsilo.sealing.signing import Signer
from medsilo.site.settings import SiteSettings


@dataclass(frozen=True)
class SiteOfInquiry:
    """A hospital, as it knows itself when it is asked.

    >>> from pathlib import Path
    >>> SiteOfInquiry("st-anna", None, Path("kept"), signer=None).name
    'st-anna'
    """

    name: str
    settings: SiteSettings
    folder: Path  # for what it keeps of this inquiry
    signer: Callable[[], Signer]  # with its kit's key


@dataclass(frozen=True)
class Inquiry:
    """A question to all hospitals. Its name among the entry points `medsilo.inquiries` is that of its job.

    >>> from pathlib import Path
    >>> inquiry = Inquiry(read=Path.read_text, bounds=None, collect=None, site=None)
    >>> inquiry.sealed
    False
    """

    read: Callable[[Path], Any]  # reads and checks the question that all hospitals get
    bounds: Callable[[Any], Bounds]  # of what a hospital may answer
    collect: Callable[[Any, Channel, Sequence[str], float], Mapping[str, Message]]  # asks; answers by name of file
    site: Callable[[Any, SiteOfInquiry], Site]
    sealed: bool = False  # whether the server reads sums alone


def inquiry_of(name: str, sealed: bool, allowed: Collection[str]) -> Inquiry:
    """Return the inquiry of a job; raises Refused for one of another kind, or of a package that is not allowed here."""
    if name not in INQUIRIES:
        raise Refused(f"the inquiry {plain(name, 60)!r} is not known here; install the medsilo that the lead has")
    if package := INQUIRIES.package_of(name):
        check_allowed(package, allowed)
    inquiry: Inquiry = INQUIRIES[name]
    if inquiry.sealed != sealed:
        raise Refused(f"the job asks {name} {'in clear' if sealed else 'sealed'}, and its classes say otherwise")
    return inquiry
