"""Parts of tasks that a server never needs, and a site only where it reads, looks or predicts."""

from typing import TYPE_CHECKING

from medsilo.core.lazy import lazily, places_in

if TYPE_CHECKING:
    pass

__all__ = [*places_in(__file__)]
__getattr__ = lazily(__name__, __file__)
