"""Parts that only some plans need, such as one that names files: each is imported when one uses it."""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
    from medsilo.learning.amplitude import AmplitudeNorm
    from medsilo.schedule.amplitude_phases import behind
    from medsilo.schedule.plan_changes import change, name_hospitals
    from medsilo.schedule.plan_files import with_files

__all__ = [*places_in(__file__)]
__getattr__ = lazily(__name__, __file__)
