"""The layers around the server's channel, and their order, which this file says once. site_stack.py has a site's.

From outside to inside, a question passes

    retry           asks again, as the plan's participation says
    ledger          keeps the heads of the hospitals' ledgers, where a plan promises privacy
    supply          sends a site the files that it lacks, once
    layers of the plan, in its order
    turns           notes who is asked and who answered, and counts the bytes of tensors
    channel         NVFlare, or a loop over sites in this process

The server's `RoundAggregation` (server_state.py) is inside of a round, since secure aggregation needs what the round
has. That is a package of its own, of which this file takes the server's part by its entry point.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from medsilo.core import optional
from medsilo.federation.channel import Channel, Transport
from medsilo.federation.requests import ByteCounter, Notify, RequestScheduler, Retry
from medsilo.federation.server_state import RoundAggregation, ServerState
from medsilo.plan import Plan
from medsilo.site.kit import KitFiles


def asking(
    channel: Transport, plan: Plan, sites: Sequence[str], tell: Notify, lost: Callable[[str], None], heads: Path
) -> tuple[Retry, ByteCounter]:
    """Return the server's channel with its layers, and what of it knows whose turn it is.

    sites: those that train; lost: hears of every site that did not answer; heads: the file of the ledgers' heads.
    """
    turns = ByteCounter(channel, tell)
    inner: Channel = turns
    for layer in reversed(plan.layers):
        inner = layer.server(inner, plan)
    if plan.network.files:
        inner = optional.FileSupply(inner, plan.network.files)
    if plan.privacy:
        inner = optional.LedgerWatch(inner, heads)
    return Retry(inner, plan.participation, sites, channel.pause, lost), turns


def aggregation_of(asker: RequestScheduler, state: ServerState, kit: KitFiles | None = None) -> RoundAggregation:
    """Return how the plan has answers become the next round's tensors. kit: the server's own."""
    secure = state.plan.secure_aggregation.implementation
    return secure.server(asker, state, kit) if secure else RoundAggregation(state)
