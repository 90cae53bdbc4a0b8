"""Parts of the core that only some studies need: each is imported when one uses it."""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
    from medsilo.core import weight_cache

__all__ = [*places_in(__file__)]
__getattr__ = lazily(__name__, __file__)
