"""Build the layers around a site, from inside to outside. The module server_stack.py builds the layers of the server.

A request passes the following layers, the outermost layer first:

    permission      rejects requests until the hospital has approved the plan
    supply          requests a missing file of initial weights, and saves the file if the plan names its hash
    isolation       runs the inner layers in a separate process, and reports a death of this process. Exact numbers
                    and unmasked tensors never leave this process. In an airlock, the process has no network, and the
                    answer of the process is checked again (airlock/study.py)
    ledger          charges each answer to the privacy budget once, before the answer is sent
    plan's layers   in the plan's order
    disclosure      chooses and rounds the numbers of the exact results that may be sent
    participant     trains, validates and tests exactly; decodes and encodes tensors (secure aggregation)

An answer passes the layers in the opposite order of a request. The participant itself, and not a layer, calls the
`UpdateCodec` (site_context.py), because secure aggregation needs the round's phase and weight. Secure aggregation
is a separate package, which medsilo finds by the package's entry point.
"""

import time
from collections.abc import Callable
from functools import partial

from medsilo.core import model_folders
from medsilo.core.parent_watch import forget_most, most_held
from medsilo.federation.participant import Participant, participant_of
from medsilo.federation.permission import Permission
from medsilo.federation.process.isolated import IsolatedParticipant
from medsilo.federation.site_context import Site, SiteContext, UpdateCodec, promises_privacy
from medsilo.learning.compute import Stop
from medsilo.runs.messages import ANSWERS, Request, StudyMessage


class DisclosingSite:
    """Answers requests with the participant's results, after the disclosure layer has rounded or suppressed the exact
    results.
    """

    def __init__(self, inner: Participant) -> None:
        self.inner = inner

    def answer(self, message: StudyMessage, stop: Stop = lambda: None) -> StudyMessage:
        asked, started = Request.received(message.facts), time.monotonic()
        forget_most()
        found = self.inner.find(asked, message.groups, stop)
        disclosure = self.inner.disclosure
        answer = ANSWERS[asked.task](
            task=asked.task,
            round=asked.round,
            study=asked.study,
            packages=disclosure.plan.code,
            seconds=time.monotonic() - started,
            memory=most_held(),
            cases=disclosure.told_cases,
            patients=disclosure.told_patients,
            by_patient=disclosure.by_patient,
            suppressed=disclosure.suppressed,
            noisy=disclosure.noisy,
            warnings=[*self.inner.warnings, *(disclosure.warnings() if asked.task == "join" else [])],
            **disclosure.disclose(found),
        )
        return answer.message(found.groups)


class TrainingSite:
    """A participant with its disclosure layer and the plan's layers; the whole stack runs in the training process."""

    def __init__(self, participant: Participant) -> None:
        self.participant = participant
        self.folder, self.settings = participant.context.folder, participant.context.settings
        self.site: Site = DisclosingSite(participant)

    def answer(self, message: StudyMessage, stop: Stop = lambda: None) -> StudyMessage:
        return self.site.answer(message, stop)

    def offload(self) -> None:
        """Free the memory of the networks; for the next answer, the site restores the networks from its folder."""
        self.participant.state.offload()


def training_site(context: SiteContext, kind: Callable[..., Participant] = participant_of) -> TrainingSite:
    """Build the site that runs in the training process: a participant with the layers that read exact numbers."""
    model_folders.look_in(context.models)
    account = None
    if promises_privacy(context):
        from medsilo.federation.account import Accounting, PrivacyAccount

        # PrivacyAccount.of may reject the study, and must do so before the study's data are read
        account = PrivacyAccount.of(context)
    whole = TrainingSite(kind(context, codec=codec_of(context)))
    for layer in reversed(context.plan.layers):
        whole.site = layer.site(whole.site, context)
    if account:
        whole.site = Accounting(whole.site, account, whole.participant)
    return whole


def codec_of(context: SiteContext) -> UpdateCodec:
    """Return the codec that encodes and decodes the tensors of a plan's sites."""
    secure = context.plan.secure_aggregation.implementation
    return secure.site(context) if secure else UpdateCodec()


def answering(
    context: SiteContext,
    permission: Permission,
    kind: Callable[..., Participant] = participant_of,
    tell: Callable[[str], None] = lambda why: None,
    room: Callable[[], Site] | None = None,
) -> Site:
    """Build the site that answers over NVFlare, with the hospital's permission as the outermost layer."""
    make: Callable[[], Site] = partial(training_site, context, kind)
    if room:
        make = room
    elif context.settings.isolated:
        make = partial(IsolatedParticipant, context, kind, tell)
    if context.plan.network.files:
        from medsilo.federation.file_supply import SuppliedSite

        permission.inner = SuppliedSite(context, make)
    else:
        permission.inner = make()
    return permission
