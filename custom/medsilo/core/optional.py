"""The parts of the engine that only some studies need, by name: each is imported when one uses it.

This names modules of all rooms, as registry.py does; a room still uses none but those below its own.
"""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
    from medsilo.core import weight_cache
    from medsilo.core.wording import in_words
    from medsilo.federation.account import Accounting, PrivacyAccount
    from medsilo.federation.coarse_counts import coarse_counts
    from medsilo.federation.exclusions import Exclusions
    from medsilo.federation.file_supply import FileSupply, SuppliedSite
    from medsilo.federation.ledger_watch import LedgerWatch
    from medsilo.federation.private_site import PrivateNumbers, PrivateSite
    from medsilo.flare.script_wire import as_model, unflat
    from medsilo.learning.amplitude import AmplitudeNorm
    from medsilo.learning.class_weights import balanced, weighted
    from medsilo.learning.compute import Compute, part_of
    from medsilo.learning.drawn import DrawBatch
    from medsilo.learning.optimizers import optimizer_of
    from medsilo.learning.perturbation import perturbed_step
    from medsilo.mixing.defence import Shield
    from medsilo.mixing.rules import NAMED_RULE
    from medsilo.privacy.noise import NoiseSource
    from medsilo.schedule.amplitude_phases import behind
    from medsilo.schedule.plan_changes import change, name_hospitals
    from medsilo.schedule.plan_files import with_files
    from medsilo.schedule.structures import mix_by_structure
    from medsilo.site.approvals import Approvals, AskingPlan, approvals_of
    from medsilo.site.signed import read_own, write_signed
    from medsilo.site.signing import UseKey, read_pair
    from medsilo.tasks.cache import held_case
    from medsilo.tasks.case_index import CaseIndex
    from medsilo.tasks.inference import Inference
    from medsilo.tasks.overlays import draw_found, draw_images
    from medsilo.tasks.own import image_patches, image_reading, reading, table_rows
    from medsilo.tasks.own.augmentation import augmented
    from medsilo.tasks.scans import Scan
    from medsilo.tasks.site_data import SiteData, folded_data, read_folder
    from medsilo.tasks.sources import DataSource
    from medsilo.tasks.splits import dirichlet
    from medsilo.tasks.survey import survey_of

__all__ = [*places_in(__file__)]
__getattr__ = lazily(__name__, __file__)
