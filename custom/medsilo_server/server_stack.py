"""Wrap the server's channel in layers. site_stack.py wraps a site in layers.

A request passes through the layers in the following order:

    retry           repeats the request, as the plan's participation section says
    ledger          watches the hospitals' privacy ledgers, if the plan uses differential privacy
    supply          sends each site the files that the site lacks, once
    plan's layers   the layers that the plan lists, in the plan's order
    turns           records requests and answers, and counts the bytes of tensors
    channel         NVFlare, or a loop over sites in this process

Secure aggregation is not a channel layer but a `RoundAggregation` (server_state.py), because secure aggregation needs
the state of the round.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from medsilo.core.errors import PlanError
from medsilo.exchange.channel import Channel, Transport
from medsilo.plan import Plan
from medsilo.registry import PluginTable
from medsilo.site.kit import KitFiles
from medsilo_server.requests import ByteCounter, Notify, RequestScheduler, Retry
from medsilo_server.server_state import RoundAggregation, ServerState

# For each protocol of secure aggregation, the object that unmasks sums over sites.
SEALED_SERVERS = PluginTable(
    "medsilo.sealed_servers",
    "medsilo_server.server_state:RoundAggregation",
    {"pairwise": "medsilo_server.sealed_server:SealedServer"},
)


def asking(
    channel: Transport, plan: Plan, sites: Sequence[str], tell: Notify, lost: Callable[[str], None], heads: Path
) -> tuple[Retry, ByteCounter]:
    """Return the outermost layer of the server's channel, and the layer that records requests and answers.

    Args:
        tell: Called when the status of the current request changes.
        lost: Called with each site that did not answer.
        heads: The file with the last entry of each hospital's privacy ledger.
    """
    turns = ByteCounter(channel, tell)
    inner: Channel = turns
    for layer in reversed(plan.layers):
        inner = layer.server(inner, plan)
    if plan.network.files:
        from medsilo_server.file_supply import FileSupply

        inner = FileSupply(inner, plan.network.files)
    if plan.privacy:
        from medsilo_server.ledger_watch import LedgerWatch

        inner = LedgerWatch(inner, heads)
    return Retry(inner, plan.participation, sites, channel.pause, lost), turns


def aggregation_of(scheduler: RequestScheduler, state: ServerState, kit: KitFiles | None = None) -> RoundAggregation:
    """Return the object that aggregates the answers in each round, with or without secure aggregation."""
    if not state.plan.secure_aggregation.implementation:
        return RoundAggregation(state)
    mode = state.plan.secure_aggregation.mode
    if mode not in SEALED_SERVERS:
        raise PlanError(
            f"secure_aggregation.mode: no server-side code of {mode} is installed; {SEALED_SERVERS.remedy(mode)}"
        )
    sealed: RoundAggregation = SEALED_SERVERS[mode](scheduler, state, kit)
    return sealed
