"""The layers around a site and around the server's channel, and their order, which this file says once.

Around a site, from outside to inside, an order passes

    known tensors   fills in the tensors that the site has already (on NVFlare alone: elsewhere nothing has far to go)
    permission      no data are read, and nothing is answered, for a plan that the hospital has not approved
    isolation       a process of its own, whose death is an answer; what is exact or in clear never leaves it
    ledger          an answer that is charged leaves once, after its charge is written
    layers of the plan, in its order
    participant     does the study

and an answer passes them the other way round. Around the server's channel stand, from outside to inside,

    retry           asks again, as the plan's participation says
    known tensors   names what a site has
    layers of the plan, in its order
    turns           notes who is asked and who answered, and counts the bytes of tensors
    channel         NVFlare, or a loop over sites in this process
"""

from collections.abc import Callable, Sequence

from medsilo.federation.account import Accounting, PrivacyAccount
from medsilo.federation.asking import Retry
from medsilo.federation.known import KnownTensors, ReceivedTensors
from medsilo.federation.participant import Participant
from medsilo.federation.permission import Permission
from medsilo.federation.process.isolated import IsolatedParticipant
from medsilo.federation.seams import Channel, Place, Site
from medsilo.federation.turns import Tell, TurnKeeper
from medsilo.learning.loop import Stop
from medsilo.plan import Plan
from medsilo.privacy.mechanisms import Charge
from medsilo.runs.messages import Parcel


class TrainingSite:
    """A site as it is in the process that trains: the participant, and the layers that see what is exact."""

    def __init__(self, place: Place, kind: type[Participant] = Participant) -> None:
        account = PrivacyAccount.of(place)  # before data are read
        own = (place.plan, place.site, place.sites, place.settings, place.folder)
        self.participant = kind(*own, lead=place.lead, kit=place.kit)
        self.folder, self.settings = place.folder, place.settings
        self.site: Site = self.participant
        for layer in reversed(place.plan.layers):
            self.site = layer.site(self.site, place)
        if account:
            self.site = Accounting(self.site, account, self.participant, _prices(place.plan))

    def answer(self, parcel: Parcel, stop: Stop = lambda: None) -> Parcel:
        return self.site.answer(parcel, stop)

    def rest(self) -> None:
        """Let go of all networks: the next answer takes over from the folder."""
        self.participant.rest()


def _prices(plan: Plan) -> Callable[[str, int], Sequence[Charge]]:
    """Return what the layers of a plan charge for an answer."""
    return lambda task, number: [charge for layer in plan.layers for charge in layer.charges(task, number)]


def answering(
    place: Place, permission: Permission, kind: type[Participant] = Participant, names: Callable[[], bool] = bool
) -> Site:
    """Return what answers on NVFlare, behind a hospital's permission, which was given.

    names: whether answers may name tensors that are as they came.
    """
    own = (place.plan, place.site, place.sites, place.settings, place.folder)
    if place.settings.isolation:
        permission.inner = IsolatedParticipant(*own, kind, place.lead, place.kit)
    else:
        permission.inner = TrainingSite(place, kind)
    return ReceivedTensors(permission, place.folder, names) if place.settings.keep_received else permission


def asking(
    channel: Channel, plan: Plan, sites: Sequence[str], tell: Tell, lost: Callable[[str], None]
) -> tuple[Retry, TurnKeeper]:
    """Return the server's channel with its layers, and what of it knows whose turn it is.

    sites: those that train; lost: hears of every site that did not answer.
    """
    turns = TurnKeeper(channel, tell)
    inner: Channel = turns
    for layer in reversed(plan.layers):
        inner = layer.server(inner, plan)
    known = KnownTensors(inner, plan.transport.sealed, lost)
    return Retry(known, plan.participation, sites), turns
