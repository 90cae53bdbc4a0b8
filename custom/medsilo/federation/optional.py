"""Parts of site and server that only some studies need, such as privacy: each is imported when one uses it."""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
    from medsilo.federation.account import Accounting, PrivacyAccount
    from medsilo.federation.file_supply import FileSupply, SuppliedSite
    from medsilo.federation.ledger_watch import LedgerWatch
    from medsilo.federation.private_site import PrivateNumbers, PrivateSite
    from medsilo.learning.class_weights import balanced, weighted
    from medsilo.learning.perturbation import perturbed_step
    from medsilo.privacy.noise import NoiseSource
    from medsilo.tasks.overlays import draw_found, draw_images

__all__ = [*places_in(__file__)]
__getattr__ = lazily(__name__, __file__)
