"""A site's parts that only some studies need, such as privacy or pictures: each is imported when one uses it."""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
    pass

__all__ = [*places_in(__file__)]
__getattr__ = lazily(__name__, __file__)
