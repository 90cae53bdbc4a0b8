"""The privacy account of a site in one study: the site charges each answer to the site's privacy ledger before sending
the answer.

A site begins an attempt at an answer, and trains. With the attempt's identifier, the site saves both its state and the
answer. After training, the site charges the attempt to the ledger, and then sends the answer. The site ignores a saved
state or answer without a ledger entry, because later answers would otherwise depend on training that was not charged.
If a site's process dies, the ledger contains every answer that was sent, and at most one answer that was not sent. If
the server repeats a request, the site sends the saved answer unchanged, and does not charge the answer a second time.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from medsilo.core.errors import Refused, reading
from medsilo.core.files import load_tensors, save_tensors, write_json
from medsilo.core.tensors import Groups
from medsilo.federation.disclosure import finite
from medsilo.federation.participant import Participant
from medsilo.federation.private_site import COUNTS_REFUSED, PrivateNumbers, agreed, how_told
from medsilo.federation.protection import Protection
from medsilo.federation.site_context import Site, SiteContext
from medsilo.learning.compute import Stop
from medsilo.privacy.accounting import counted, epsilon_of, noise_for
from medsilo.privacy.mechanisms import Charge
from medsilo.runs.messages import BETWEEN, Request, StudyMessage, digest_of, flat
from medsilo.runs.own_files import Spent
from medsilo.runs.paths import ANSWER_FILES, SPENT
from medsilo.site.ledger import WHOLE, CountedStudy, Ledger, Spending, ledger_of


class PrivacyAccount:
    def __init__(self, ledger: Ledger, study: CountedStudy, folder: Path) -> None:
        self.ledger, self.study, self.folder, self.attempt = ledger, study, folder, ""

    @classmethod
    def of(cls, context: SiteContext) -> Self | None:
        """Return the privacy account, or None if the hospital demands no privacy and the plan promises no privacy to
        patients.

        Raises Refused, before data are read, if the plan's privacy promise can't be kept or the privacy budget is
        spent.
        """
        plan, folder, demands = context.plan, context.folder, context.settings.privacy
        protection, promise = Protection(context), agreed(plan, demands)
        if promise is None or (demands is None and not protection.on):
            return None
        if how_told(plan, demands, "counts", True) == "silent":
            raise Refused(COUNTS_REFUSED)
        requester = protection.requester
        ledger = ledger_of(protection.budget, requester.data, context.kit)
        spending = Spending(study=requester.study, plan=plan.hash, method=plan.algorithm.title, lead=requester.lead)
        account = cls(ledger, CountedStudy(spending, demands, protection.budget.runs), folder)
        about = Charge.normal(WHOLE, noise_for(promise.epsilon, promise.delta, 1.0, 1))
        ledger.expect(account.study, [about])
        return account

    def begin(self) -> str:
        """Begin an attempt at an answer, and return the attempt's identifier."""
        self.attempt = secrets.token_hex(16)
        return self.attempt

    def counts(self, attempt: str) -> bool:
        """True if the ledger has an entry for the attempt; only then may the site use the state that it saved in this
        attempt.
        """
        return self.ledger.standing().has(self.study.name, attempt)

    def again(self, request: StudyMessage) -> StudyMessage | None:
        """If the ledger contains the attempt of a saved answer to this request, return the saved answer; otherwise,
        return None.
        """
        path = self._path(request)
        if not path.exists():
            return None
        with reading("this site's last answer"):
            tensors, facts = load_tensors(path)
            if facts["request"] != digest_of(request) or not self.counts(facts["attempt"]):
                return None
            groups: Groups = {group: {} for group in facts["groups"]}
            for key, tensor in tensors.items():
                group, _, name = key.partition(BETWEEN)
                groups[group][name] = tensor
            return StudyMessage(groups, facts["facts"])

    def settle(self, request: StudyMessage, reply: StudyMessage, purpose: str, charges: Sequence[Charge]) -> None:
        """Charge an answer to the ledger, after saving it in place of the saved answer to an earlier request of
        the same task.

        The answer may leave the site after this method has returned. Raises Refused if the privacy budget is spent.
        """
        own = {"request": digest_of(request), "attempt": self.attempt, "groups": list(reply.groups)}
        save_tensors(self._path(request), flat(reply.groups), {**own, "facts": reply.facts})
        self._tell_hospital(charges)
        # A site charges the ledger in the last step before the site sends an answer. If the process dies between the
        # charge and the sending, the ledger charges an answer that did not leave the site.
        self.ledger.charge(self.study, purpose, self.attempt, charges)

    def _path(self, request: StudyMessage) -> Path:
        return self.folder / ANSWER_FILES.replace("*", str(request.facts["task"]))

    def _tell_hospital(self, charges: Sequence[Charge]) -> None:
        """Write the spent privacy budget, including the charges of this study, to a file that the hospital's report
        reads.
        """
        standing, added = self.ledger.standing(), counted(charges)
        delta = self.study.demands.delta if self.study.demands else 1e-5
        study, spent = standing.of(self.study.name) + added, standing.charged + added
        said = Spent(
            study=finite(epsilon_of(study, delta)),
            all_studies=finite(epsilon_of(spent, delta)),
            delta=delta,
            allowed=self.study.demands.epsilon if self.study.demands else None,
            entries=1 + sum(entry.spending == self.study.spending for entry in standing.entries),
        )
        write_json(self.folder / SPENT, said.as_json())


class Accounting:
    """A site that charges each answer to the site's privacy ledger, and sends the saved answer again if the server
    repeats a request.

    This layer gives the participant's state the identifier of each attempt at an answer. The participant saves its
    state with the attempt's identifier, and later uses this state only if the ledger contains the identifier.
    """

    def __init__(self, inner: Site, account: PrivacyAccount, participant: Participant) -> None:
        self.inner, self.account, self.participant = inner, account, participant
        account.ledger.plan(account.study, self.planned())
        participant.state.counts = account.counts

    def answer(self, message: StudyMessage, stop: Stop) -> StudyMessage:
        """Answer a request, and attach the ledger's signed head (number of lines and last hash).

        The server compares the heads that a hospital sends, and so notices if the hospital restores an old copy of its
        ledger.

        The digest of a request does not cover the server's list of ledger heads, so a repeated request has the same
        digest as the first.
        """
        asked, ledger = Request.received(message.facts), self.account.ledger
        ledger.check_heads([head.model_dump() for head in asked.ledgers])
        facts = {name: value for name, value in message.facts.items() if name != "ledgers"}
        reply = self._charged(StudyMessage(message.groups, facts), asked, stop)
        return replace(reply, facts={**reply.facts, "ledger": ledger.signed_head()})

    def _charged(self, message: StudyMessage, request: Request, stop: Stop) -> StudyMessage:
        if reply := self.account.again(message):
            return reply
        state, own, account = self.participant.state, (request.task, request.round), self.account
        charges = [*self._trained(*own), *self._numbers.charges(*own), *self._beside(*own)]
        account.ledger.afford(account.study, charges)
        state.attempt = account.begin()
        reply = self.inner.answer(message, stop)
        if self._numbers.counted:
            drawn = self._numbers.counted[0]  # the noise of the counts is sampled once per study
            account.ledger.charge(account.study, "numbers of cases", drawn, self._numbers.count_charges)
        # the participant must not use its state in memory before the answer that belongs to this state is charged
        done, state.done = state.done, -1
        what = f"{request.task} {request.round}" if request.task == "round" else request.task
        account.settle(message, reply, what, charges)
        state.done = done
        return reply

    def planned(self) -> list[Charge]:
        rounds = [("round", number) for number in range(1, self.participant.context.plan.rounds + 1)]
        asked = [("join", 0), *rounds, ("deliver", 0), ("test", 0)]
        trained = (charge for own in rounds for charge in self._trained(*own))
        return [*trained, *self._numbers.planned(), *(charge for own in asked for charge in self._beside(*own))]

    @property
    def _numbers(self) -> PrivateNumbers:
        assert self.participant.disclosure.numbers
        return self.participant.disclosure.numbers

    def _beside(self, task: str, number: int) -> list[Charge]:
        """Return the privacy charges that the plan's layers add to an answer."""
        layers = self.participant.context.plan.layers
        return [Charge.normal(*told) for layer in layers for told in layer.charges(task, number).items()]

    def _trained(self, task: str, number: int) -> list[Charge]:
        """Return the privacy charges of a training round; a hospital that does not train has no charge."""
        private, phase_of = self.participant.trainer.private, self.participant.context.plan.course.phase_of
        return private.charges(number, phase_of(number)) if private and task == "round" else []
