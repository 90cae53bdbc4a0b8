"""Parts of a hospital's own records that only some hospitals need: approvals, and what is signed with a kit's key."""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
    from medsilo.site.approvals import Approvals, AskingPlan, approvals_of
    from medsilo.site.signed import read_own, write_signed
    from medsilo.site.signing import UseKey, read_pair

__all__ = [*places_in(__file__)]
__getattr__ = lazily(__name__, __file__)
