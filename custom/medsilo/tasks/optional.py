"""Parts of tasks that a server never needs, and a site only where it reads, looks or predicts."""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
    from medsilo.tasks.inference import Inference
    from medsilo.tasks.lazy_cases import LazyCases, Memory
    from medsilo.tasks.site_data import folded, labels_of
    from medsilo.tasks.survey import Survey, surveyed

__all__ = [*places_in(__file__)]
__getattr__ = lazily(__name__, __file__)
