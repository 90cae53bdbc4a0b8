"""Parts that only a plan with an amplitude needs: each is imported when one uses it."""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily

if TYPE_CHECKING:
    from medsilo.learning.amplitude import AmplitudeNorm
    from medsilo.schedule.amplitude_phases import behind

__all__ = ("AmplitudeNorm", "behind")
__getattr__ = lazily(__name__, __file__)
