"""The end of a round of a mixer by itself, as the coordinator makes it."""

from torch import Tensor

from medsilo.mixing.mixers import Aggregator


def result_of(mixer: Aggregator, site: str) -> dict[str, Tensor]:
    """Close the round and return what a site gets next."""
    mixer.finish()
    return mixer.current(site)
