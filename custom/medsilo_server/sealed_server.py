"""Lead secure aggregation from the server: forward messages, and add numbers that the server cannot read."""

from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Any

from torch import Tensor

from medsilo.core.errors import ParticipationError
from medsilo.core.tensors import Groups, Tensors
from medsilo.exchange.channel import Missing
from medsilo.exchange.checks import check_forms, check_numbers
from medsilo.mixing.aggregators import WeightedMean
from medsilo.mixing.mean_forms import MeanForm
from medsilo.runs.messages import Joined, SecAggAnswer, SiteAnswer, Task
from medsilo.schedule.phase import Phase
from medsilo.site.kit import KitFiles
from medsilo_secagg.identity import Certified, Unsigned, signer_of
from medsilo_secagg.letters import KeyShares, Roster, needed
from medsilo_secagg.sealed_rounds import (
    WORDS,
    Blocks,
    KeyAgreement,
    MaskedMessage,
    SealedGroup,
    ServerMessage,
    SiteMessage,
    terms_of,
)
from medsilo_secagg.streams import Words
from medsilo_secagg.terms import Terms
from medsilo_server.masked_sums import KeyCollection, MaskedSums
from medsilo_server.requests import Exchange, RequestScheduler
from medsilo_server.server_state import RoundAggregation, ServerState, Store

Take = Callable[[str, SiteMessage], None]
PREFIX = "@sealed"  # prefix of keys in a checkpoint; no name of a group begins with this prefix


class SealedServer(RoundAggregation):
    """Aggregates answers that the server cannot read: the server receives only masked numbers, and the sites help to
    unmask the sum of a round.
    """

    def __init__(self, scheduler: RequestScheduler, state: ServerState, kit: KitFiles | None = None) -> None:
        """Create the server's side of secure aggregation for a study.

        Args:
            kit: With a kit, the server detects false signatures before it forwards keys; without a kit, only hospitals
                detect them.
        """
        super().__init__(state)
        self.signer = signer_of(kit) if kit else None
        self.scheduler, self.plan = scheduler, state.plan
        state.store = self.store = SealedStore()
        self.layout, self.aggregators = state.layout, state.aggregators
        self.terms: Terms  # the terms of the study, which do not exist before the sites have agreed on keys
        self.blocks: Blocks
        self._told = ServerMessage()
        self._deals: dict[str, KeyShares] = {}
        self._round: MaskedSums | None = None
        self._begin({})

    # ------------------------------------------------------------------ start of the study
    def agree(self, joined: Mapping[str, Joined]) -> None:
        """Make the sites agree on new keys. If sites drop out during the agreement, the remaining sites begin a new
        agreement, provided the plan allows so few sites.
        """
        super().agree(joined)
        here = [site for site in self.state.sites if site in joined]
        heaviest = max(joined[site].cases.train or 1 for site in here)
        assembly = None
        while assembly is None:
            self.terms = terms_of(self.plan, self.scheduler.study, here)
            agreement = KeyAgreement(mark=token_hex(16), sites=self.terms.sites, heaviest=heaviest)
            here, assembly = self._agree(agreement)
        self.blocks, self._told = Blocks(self.plan, self.terms, heaviest), ServerMessage(current=agreement.mark)
        signed = all(introduction.certificates for introduction in assembly.introductions)
        settings = self.plan.secure_aggregation
        self.state.details["secure_aggregation"] = {
            "mode": settings.mode,
            "keys": Certified.basis if signed else Unsigned.basis,
            "protects": settings.promises,
        }

    def _agree(self, agreement: KeyAgreement) -> tuple[list[str], Roster | None]:
        """Collect the sites' keys, and then send all keys to each site.

        Return the sites that answered, and the keys of all sites, or None if a site failed.
        """
        gathering = KeyCollection(self.terms, self.signer)

        def introduced(site: str, said: SiteMessage) -> None:
            gathering.add(site, needed(site, said.introduction))

        here = self._agreed(ServerMessage(agreement=agreement), introduced)
        if here != list(self.terms.sites):
            return here, None
        assembly = gathering.assembly()
        here = self._agreed(ServerMessage(agreement=agreement, assembly=assembly), lambda site, said: None)
        return here, assembly if here == list(self.terms.sites) else None

    def _agreed(self, message: ServerMessage, take: Take) -> list[str]:
        exchange = self._ask("agree", 0, self.terms.sites, message, take)
        self.scheduler.check(exchange, "keys of the study")
        return sorted(exchange.replies)

    def _ask(self, task: Task, number: int, sites: Sequence[str], message: ServerMessage, take: Take) -> Exchange:
        """Send a message to sites.

        Args:
            take: Receives each site's answer, and raises Refused to reject the answer.
        """

        def words(site: str) -> tuple[Groups, dict[str, Any]]:
            return {}, {"secagg": message.facts()}

        def accept(site: str, answer: SiteAnswer, sent: Groups) -> None:
            assert isinstance(answer, SecAggAnswer)
            check_forms(sent, {})
            take(site, SiteMessage.read(site, answer.secagg))

        return self.scheduler.ask(task, number, sites, words, accept)

    # ------------------------------------------------------------------ a round
    def _begin(self, groups: Mapping[str, SealedGroup]) -> None:
        self.groups = dict(groups)
        self._beside: dict[str, dict[str, dict[str, Tensor]]] = {name: {} for name in groups}
        self._samples: dict[str, int] = {}
        self._deals, self._round = {}, None

    def begin(self, number: int, phase: Phase) -> dict[str, Missing]:
        late = Missing("refused", "was not there when the sites agreed on keys; it may be when the study is resumed")
        absent = {site: late for site in self.state.sites if site not in self.terms.sites}
        self._begin(self.blocks.of(phase, self.layout))
        if not self.groups:
            return absent
        sums = self._round = MaskedSums(self.terms, number, [group.block for group in self.groups.values()])
        opened: list[tuple[str, ...]] = []

        def offered(site: str, said: SiteMessage) -> None:
            sums.offer(site, needed(site, said.offer))
            opened.append(said.opened)

        exchange = self._ask("offer", number, self.terms.sites, self._told, offered)
        self.scheduler.check(exchange, f"keys of round {number}")
        again = self._repeated(number, opened)
        self._deals = sums.deals(again)
        repeated = Missing("refused", f"round {number} is repeated with the hospitals whose sum was opened before")
        others = dict.fromkeys(exchange.replies.keys() - self._deals.keys(), repeated)
        return {**absent, **others, **exchange.missing}

    def _repeated(self, number: int, opened: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """Return the sites of the sum that was unmasked before the server stopped, or all sites if no sum was unmasked.

        Raise ParticipationError if sites of the unmasked sum are missing. Unmasking a second sum over other sites would
        disclose the models of sites that are in only one of the two sums.

        Args:
            opened: For each answer of a site, the sites in the sum of this round that the site helped to unmask.
        """
        before = max(opened, key=lambda sites: (bool(sites), opened.count(sites), sites), default=())
        if not before or opened.count(before) < self.terms.threshold:
            return self.terms.sites
        if gone := sorted(set(before) - set(self.terms.sites)):
            raise ParticipationError(
                f"secure aggregation: the sum of round {number} over {', '.join(before)} was unmasked before the "
                f"server stopped. Only the same hospitals can repeat it: wait for {', '.join(gone)}, or start again"
            )
        return before

    def letters(self, site: str, groups: Groups) -> dict[str, Any]:
        if site not in self.terms.sites:
            return {}
        more = {"means": self.store.disclosed(groups), "deal": self._deals.get(site)}
        return self._told.model_copy(update=more).facts()

    def expected(self, phase: Phase) -> Groups:
        clear = super().expected(phase)
        return {name: self.groups[name].expected() if name in self.groups else own for name, own in clear.items()}

    def take(self, site: str, groups: Groups, samples: int, phase: Phase) -> None:
        clear = {name: tensors for name, tensors in groups.items() if name not in self.groups}
        super().take(site, clear, samples, phase)
        if self._round is not None:
            self._round.add(site, {name: groups[name][WORDS] for name in self.groups})
        for name, group in self.groups.items():
            self._beside[name][site] = {key: groups[name][key] for key in group.beside}
        self._samples[site] = samples

    # ------------------------------------------------------------------ end of a round
    def finish(self, number: int) -> None:
        """Make the sites unmask the sums. Pass each sum to its aggregator, or store the mean if sites move their
        tensors towards the mean.
        """
        if self._round is None:
            return
        sites, sums = self._open_sums(self._round, number)
        for name, group in self.groups.items():
            if isinstance(group.form, MeanForm):
                self._hand_over(group, group.block.read(sums[name], sum(self._weights(group, sites).values())), sites)
            else:  # the stored mean goes to all sites, including sites that missed the round
                mean = group.block.read(sums[name], len(sites), len(sites))
                self.store.keep(name, mean, MaskedMessage(round=number, sites=len(sites)))

    def _open_sums(self, sums: MaskedSums, number: int) -> tuple[tuple[str, ...], dict[str, Words]]:
        """Unmask the sums with the sites' shares; return the sites whose numbers are in the sums, and the sums.

        If too few sites help, raise ParticipationError with the sites' reasons.
        """
        request, missing = sums.survivors(), dict[str, Missing]()

        def revealed(site: str, said: SiteMessage) -> None:
            sums.reveal(site, needed(site, said.reveal))

        try:
            letter = self._told.model_copy(update={"request": request})
            missing.update(self._ask("unmask", number, request.sites, letter, revealed).missing)
            return request.sites, sums.open()
        except ParticipationError as error:
            reasons = sorted({gone.text for gone in missing.values()})
            raise ParticipationError("; ".join([str(error), *reasons])) from error

    def _weights(self, group: SealedGroup, sites: Sequence[str]) -> dict[str, int]:
        return {site: group.weight(self._samples[site]) for site in sites}

    def _hand_over(self, group: SealedGroup, mean: Mapping[str, Tensor], sites: Sequence[str]) -> None:
        """Pass a mean to the group's aggregator, together with the integer tensors of the first site."""
        tensors = {**mean, **self._beside[group.name][min(sites)]}
        tensors = {name: tensors[name] for name in group.like}
        assert isinstance(group.form, MeanForm)
        if group.form.enter is None:
            ranges = {group.name: group.group.ranges(self.layout, self.plan.task)}
            check_numbers({group.name: tensors}, [group.group], ranges, {})
        aggregator = self.aggregators[group.name]
        assert isinstance(aggregator, WeightedMean)
        aggregator.take_mean(tensors, {site: float(w) for site, w in self._weights(group, sites).items()})


class SealedStore(Store):
    """Stores the latest mean of each group whose mean is sent to the sites; the sites then move their own tensors
    towards the mean.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Tensors, MaskedMessage]] = {}

    def keep(self, group: str, mean: Tensors, masked: MaskedMessage) -> None:
        self._kept[group] = mean, masked

    def find(self, group: str) -> Tensors | None:
        return self._kept[group][0] if group in self._kept else None

    def disclosed(self, groups: Mapping[str, Tensors]) -> dict[str, MaskedMessage]:
        """Return, for each mean in a message to a site, the round of the mean and the number of sites in the mean."""
        return {group: self._kept[group][1] for group in groups if group in self._kept}

    # ------------------------------------------------------------------ checkpoints
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"{PREFIX}/{g}/{name}": own for g, (mean, _) in self._kept.items() for name, own in mean.items()}
        facts = {group: held.facts() for group, (_, held) in self._kept.items()}
        return tensors, {"sealed": facts} if facts else {}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self._kept = {}
        for group, told in facts.get("sealed", {}).items():
            prefix = f"{PREFIX}/{group}/"
            mean = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            self.keep(group, mean, MaskedMessage.read("the checkpoint", told))
