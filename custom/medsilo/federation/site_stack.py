"""The layers around a site, and their order, which this file says once. server_stack.py has those of the server.

From outside to inside, an order passes

    permission      no data are read, and nothing is answered, for a plan that the hospital has not approved
    supply          files that the network begins with: who lacks one says so, and keeps what the plan's hash names
    isolation       a process of its own, whose death is an answer; what is exact or in clear never leaves it
    ledger          an answer that is charged leaves once, after its charge is written
    layers of the plan, in its order
    disclosure      makes the answer of what was found exactly: what of it may leave, and how it is rounded
    participant     does the study, exactly; tensors come and go in the plan's envelope (secure aggregation)

and an answer passes them the other way round. The site's `UpdateCodec` (place.py) is inside of a round, since secure
aggregation needs what the round has. That is a package of its own, of which this file takes a site's part by its entry
point.
"""

import time
from collections.abc import Callable
from functools import partial

from medsilo.core import model_folders, optional
from medsilo.core.parent_watch import forget_most, most_held
from medsilo.federation.participant import Participant
from medsilo.federation.permission import Permission
from medsilo.federation.process.isolated import IsolatedParticipant
from medsilo.federation.site_context import Site, SiteContext, UpdateCodec, promises_privacy
from medsilo.learning.compute import Stop
from medsilo.runs.messages import ANSWERS, Request, StudyMessage


class DisclosingSite:
    """A site that answers with what its participant found, as it may leave."""

    def __init__(self, inner: Participant) -> None:
        self.inner = inner

    def answer(self, parcel: StudyMessage, stop: Stop = lambda: None) -> StudyMessage:
        asked, started = Request.received(parcel.facts), time.monotonic()
        forget_most()
        found = self.inner.find(asked, parcel.groups, stop)
        disclosure = self.inner.disclosure
        answer = ANSWERS[asked.task](
            task=asked.task,
            round=asked.round,
            study=asked.study,
            packages=disclosure.plan.code,
            seconds=time.monotonic() - started,
            memory=most_held(),
            cases=disclosure.counted,
            suppressed=disclosure.suppressed,
            noisy=disclosure.noisy,
            warnings=[*self.inner.warnings, *(disclosure.warnings() if asked.task == "join" else [])],
            **disclosure.disclose(found),
        )
        return answer.parcel(found.groups)


class TrainingSite:
    """A site as it is in the process that trains: the participant, behind its disclosure and layers."""

    def __init__(self, participant: Participant) -> None:
        self.participant = participant
        self.folder, self.settings = participant.place.folder, participant.place.settings
        self.site: Site = DisclosingSite(participant)

    def answer(self, parcel: StudyMessage, stop: Stop = lambda: None) -> StudyMessage:
        return self.site.answer(parcel, stop)

    def offload(self) -> None:
        """Let go of all networks: the next answer takes over from the folder."""
        self.participant.state.offload()


def training_site(place: SiteContext, kind: Callable[..., Participant] = Participant) -> TrainingSite:
    """Return a site with the layers that see what is exact."""
    model_folders.look_in(place.models)
    account = optional.PrivacyAccount.of(place) if promises_privacy(place) else None  # before data are read
    whole = TrainingSite(kind(place, envelope=envelope_of(place)))
    for layer in reversed(place.plan.layers):
        whole.site = layer.site(whole.site, place)
    if account:
        whole.site = optional.Accounting(whole.site, account, whole.participant)
    return whole


def envelope_of(place: SiteContext) -> UpdateCodec:
    """Return what the plan has tensors travel in."""
    secure = place.plan.secure_aggregation.implementation
    return secure.site(place) if secure else UpdateCodec()


def answering(
    place: SiteContext,
    permission: Permission,
    kind: type[Participant] = Participant,
    tell: Callable[[str], None] = lambda why: None,
) -> Site:
    """Return what answers on NVFlare, behind a hospital's permission, which was given. tell: see isolated.py."""
    make: Callable[[], Site] = partial(training_site, place, kind)
    if place.settings.isolated:
        make = partial(IsolatedParticipant, place, kind, tell)
    permission.inner = optional.SuppliedSite(place, make) if place.plan.network.files else make()
    return permission
