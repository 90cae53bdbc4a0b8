"""Stack the server's channel layers in their order. A site's layers are in site_stack.py.

A request passes through these layers, from the outside to the inside:

    retry           repeats the request, as the plan's participation section says
    ledger          watches the hospitals' privacy ledgers, if the plan uses differential privacy
    supply          sends a site the files that it lacks, once
    layers of the plan, in its order
    turns           records requests and answers, and counts the bytes of tensors
    channel         NVFlare, or a loop over sites in this process

The server's `RoundAggregation` (server_state.py) is not a channel layer, because secure aggregation needs the round's
state. Secure aggregation is a separate package, whose server part is loaded by its entry point.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from medsilo.exchange.channel import Channel, Transport
from medsilo.plan import Plan
from medsilo.site.kit import KitFiles
from medsilo_server.requests import ByteCounter, Notify, RequestScheduler, Retry
from medsilo_server.server_state import RoundAggregation, ServerState


def asking(
    channel: Transport, plan: Plan, sites: Sequence[str], tell: Notify, lost: Callable[[str], None], heads: Path
) -> tuple[Retry, ByteCounter]:
    """Return the server's channel with all layers, and the layer that counts requests and answers.

    Args:
        channel: Carries the messages.
        plan: The plan of the study.
        sites: The sites that train.
        tell: Called with the status of each request.
        lost: Called for every site that did not answer.
        heads: The file with the last entries of the hospitals' ledgers.
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


def aggregation_of(asker: RequestScheduler, state: ServerState, kit: KitFiles | None = None) -> RoundAggregation:
    """Return the aggregation of a study's rounds, with secure aggregation if the plan asks for it.

    Args:
        asker: Sends requests to the sites.
        state: The server's state.
        kit: The files of the server's startup kit.
    """
    secure = state.plan.secure_aggregation.implementation
    return secure.server(asker, state, kit) if secure else RoundAggregation(state)
