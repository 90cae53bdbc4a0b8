"""The server's side of a study: who is asked, what is accepted, how it is merged, what is kept.

No word here of how parcels travel: a `Transport` brings them, in a plain loop or over NVFlare.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from medsilo.core.errors import Aborted, Died, MedsiloError, ParticipationError, Refused, reading
from medsilo.core.package import package_facts
from medsilo.core.spill import Kept
from medsilo.deploy import THRESHOLDS, Spacing
from medsilo.federation import ending
from medsilo.federation.checks import (
    check_classes,
    check_counts,
    check_metrics,
    check_package,
    check_warnings,
    is_number,
    same_layout,
)
from medsilo.federation.pictures import draw_amplitude
from medsilo.federation.summary import summarise
from medsilo.learning.loop import is_finite
from medsilo.methods.base import Groups, Parcel
from medsilo.methods.headquarters import Headquarters
from medsilo.mixing.mixers import Mixer, WeightedMean
from medsilo.plan import Plan
from medsilo.runs.record import AMPLITUDE, Record, now
from medsilo.site.settings import SiteSettings

RETRY_PAUSE = 5.0  # seconds before a missing site is asked again
MOST_SAMPLES = 1_000_000_000
METRICS = {  # what a site tells beside tensors, by what it was asked
    "join": frozenset[str](),
    "round": frozenset({"train_loss", "validation", "validation_loss"}),
    "deliver": frozenset({"validation", "validation_loss"}),
    "test": frozenset({"test", "test_loss", "cases", "selected"}),
}

Outgoing = Callable[[str], Parcel]
Receive = Callable[[str, Parcel], None]


@dataclass(frozen=True)
class Missing:
    """Why a site gave nothing in a round."""

    kind: Literal["refused", "lost"]
    reason: str
    passing: bool = False  # a refusal that asking again may heal

    @classmethod
    def refused(cls, error: MedsiloError) -> "Missing":
        return cls("refused", str(error), isinstance(error, Died))


class Transport(Protocol):
    """Brings parcels to sites and their answers back."""

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> dict[str, Missing]:
        """Ask all these sites at once; `receive` raises Refused for an answer that must not count.

        Returns the sites without an accepted answer.
        """

    def pause(self, seconds: float) -> None:
        """Wait; raises Aborted when the run was told to stop."""


@dataclass
class Exchange:
    """What came of asking all sites once."""

    asked: list[str] = field(default_factory=list)
    replies: dict[str, Parcel] = field(default_factory=dict)  # without their tensors: those are in the mixers
    missing: dict[str, Missing] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)
    bytes_down: dict[str, int] = field(default_factory=dict)

    def by_kind(self, kind: str) -> dict[str, str]:
        return {site: gone.reason for site, gone in sorted(self.missing.items()) if gone.kind == kind}

    def warned(self) -> list[str]:
        """The sites that answered, and have something to say."""
        return [site for site, reply in sorted(self.replies.items()) if reply.facts["warnings"]]


class Coordinator:
    """Leads one study from the first parcel to the summary."""

    def __init__(
        self,
        plan: Plan,
        sites: Sequence[str],
        transport: Transport,
        record: Record,
        engine: str,
        on_round: Callable[[dict[str, Any]], None] = lambda record: None,
        settings: SiteSettings | None = None,
    ) -> None:
        self.plan, self.transport, self.record = plan, transport, record
        self.sites = sorted(plan.participation.sites or sites)  # others that are connected are not asked
        self.everyone = sorted({*self.sites, *plan.participation.unseen})  # those too that only see the outcome
        self.agreed: set[str] = set()  # those that let each other have their personal models
        self.settings = settings or SiteSettings(device="cpu")  # the server's own
        self.engine, self.on_round = engine, on_round
        self.study = record.folder.name
        self.required = plan.participation.required
        self.mixers: dict[str, Mixer] = {}
        self.stage: int | None = None  # the phase that the mixers are of
        self.only_given: set[str] = set()  # groups of that phase that sites don't send back
        self.details: dict[str, Any] = {}
        self.curve: list[list[float]] = []  # of the super model's threshold
        self.spacing: Spacing | None = None  # of the super model's training images
        self.done = 0
        self.best: dict[str, Any] | None = None  # the best model's round, and its validation score at each site
        self.rounds: list[dict[str, Any]] = []
        self.ends: dict[str, Exchange] = {}
        networks = plan.build_networks()
        self.parameters = sum(parameter.numel() for parameter in networks["model"].parameters())
        self.personal = plan.method.personal(networks, plan.last_phase)
        self.common = plan.method.common(networks, plan.last_phase) is not None
        self.settled: dict[str, list[str]] = {}  # the constants that each site has confirmed
        self.smallest: int | None = None  # training cases of the smallest site
        with torch.device("meta"):  # shapes and dtypes only: the server holds no model beside its mixers
            self.layout = plan.build_networks()
        self.choice = plan.method.choice(self.layout)
        if cautions := plan.method.cautions(self.sites):
            self.details["cautions"] = cautions
        self.writer = ThreadPoolExecutor(1)  # writes a round's checkpoint while the sites are at the next
        self.writing: Future[None] | None = None

    # ------------------------------------------------------------------ the course of a study
    def run(self, resume: bool = False) -> dict[str, Any]:
        """Lead the study to its end; returns the summary, which is also written when the study fails."""
        started, clock = now(), time.monotonic()
        if resume:
            with reading(f"the checkpoint of run {self.record.folder.name}"):
                self._restore()
        else:
            self.record.begin(self.plan)
        reason: str | None = "stopped"
        try:
            self._check_sites()
            if not resume:
                self._open_mixers(1)
                self._save()
                self._written()  # a disk that can't be written to shows before anybody trains
            joined = self._end("join", 0)
            self.smallest = min(reply.facts["cases"]["train"] for reply in self._trained(joined).values())
            self.agreed.update(site for site, reply in joined.replies.items() if reply.facts["shares"])
            while self.done < self.plan.rounds:
                self._round(self.done + 1)
            self._finish()
            reason = None
        except MedsiloError as error:
            reason = str(error)
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: see the server's log"
            raise
        finally:
            self.writer.shutdown()
            summary = summarise(self, reason, started, time.monotonic() - clock)
            self.record.write_summary(summary)
        return summary

    def _check_sites(self) -> None:
        if len(self.sites) < self.required:
            raise ParticipationError(
                f"{len(self.sites)} sites are there ({', '.join(self.sites) or 'none'}) but the plan needs "
                f"{self.required}; start the others or lower participation.minimum"
            )

    def _round(self, number: int) -> None:
        started = time.monotonic()
        phase = self.plan.phase_of(number)
        self._open_mixers(number)
        exchange = self._exchange("round", number)
        self._written()
        breach = self._breach(exchange, f"round {number}")
        if breach is None:
            self._consider_best(exchange, number - 1)
            for group in self._shared(phase):
                self.mixers[group].finish()
            self.done = number
        record = {
            "round": number,
            "phase": phase,
            "seconds": round(time.monotonic() - started, 3),
            "asked": self.sites,
            "answered": sorted(exchange.replies),
            "refused": exchange.by_kind("refused"),
            "lost": exchange.by_kind("lost"),
            "warnings": {site: exchange.replies[site].facts["warnings"] for site in exchange.warned()},
            "sites": {site: self._line(exchange, site) for site in sorted(exchange.replies)},
        }
        self.rounds.append(record)
        self.record.add_round(record)
        self.on_round(record)
        if breach:
            raise ParticipationError(breach)
        self._save()

    @staticmethod
    def _line(exchange: Exchange, site: str) -> dict[str, Any]:
        reply = exchange.replies[site]
        return {
            **reply.metrics,
            "samples": reply.samples,
            "seconds": round(reply.facts["seconds"], 3),
            "memory": int(reply.facts["memory"]),
            "bytes_up": exchange.bytes_up[site],
            "bytes_down": exchange.bytes_down[site],
        }

    def _finish(self) -> None:
        """Give every site the outcome, choose the model, test it once."""
        number = self.plan.rounds
        trained = {site for record in self.rounds for site in record["answered"]}
        self.agreed -= set(self.sites) - trained  # the model of a site that was never there is nobody's expert
        if self.plan.ending != self.plan.last_phase:
            self._enter(self.plan.ending)
        delivered = self._end("deliver", number)
        self._written()
        self._consider_best(delivered, number)
        chosen = self.best["round"] if self.best else number
        if self.common:
            self._save_global("last", number)
        if chosen != number:
            with reading(f"the best checkpoint of run {self.record.folder.name}"):
                self._take_over(*self.record.load_best(chosen), self._shared(self.plan.last_phase))
        if not self.personal:
            self._save_global("best", chosen)
        if self.choice:
            self._conclude(delivered)
        tested = self._end("test", number, selected=chosen, empty=chosen == number)
        if self.choice:
            self.details["super_model"]["tested"] = _chosen(tested)

    def _conclude(self, delivered: Exchange) -> None:
        """Find the super model's threshold and keep it."""
        tuning = ending.tuned(self.plan, delivered.replies)
        self.spacing = ending.spacing(self.plan, delivered.replies)
        model = ending.at_server(self.plan, self.layout, self.mixers, self.agreed, tuning, self.spacing)
        model.save(self.record.folder / ending.FOLDER)
        self.curve = [list(point) for point in tuning.curve] if tuning else []
        self.details["super_model"] = {
            "rule": model.rule,
            "sites": list(model.sites),
            "agreed": list(model.agreed),
            "threshold": model.threshold,
            "curve": self.curve,
            "validated": _chosen(delivered),
        }

    # ------------------------------------------------------------------ asking
    def _end(self, task: str, number: int, selected: int | None = None, empty: bool = False) -> Exchange:
        """An exchange before the first or after the last round."""
        exchange = self.ends[task] = self._exchange(task, number, selected, empty)
        breach = self._breach(exchange, task)
        if breach:
            raise ParticipationError(breach)
        return exchange

    def _exchange(self, task: str, number: int, selected: int | None = None, empty: bool = False) -> Exchange:
        """Ask every site, as often as the plan allows."""
        exchange = Exchange(self.sites if task == "round" else self.everyone)
        rules = self.plan.participation
        started = time.monotonic()
        facts = {
            "task": task,
            "round": number,
            "study": self.study,
            "plan": self.plan.hash,
            "sites": self.everyone,
            "timeout": rules.timeout,
            "selected": selected,
            "package": package_facts(),
        }
        if self.plan.training.truncate:
            facts["train_cases"] = self.smallest
        phase = self.plan.phase_of(number) if task == "round" else self.plan.ending

        def outgoing(site: str) -> Parcel:
            groups = {} if task == "join" or empty else self._payload(site, phase)
            parcel = Parcel(groups, facts=facts | self._told(task, site))
            exchange.bytes_down[site] = parcel.size()
            return parcel

        def receive(site: str, reply: Parcel) -> None:
            self._check(site, reply, task, number, exchange)
            exchange.bytes_up[site] = reply.size()
            for group, tensors in reply.groups.items():
                self.mixers[group].add(site, tensors, reply.samples)
            exchange.replies[site] = Parcel(facts=reply.facts, samples=reply.samples, metrics=reply.metrics)
            if task == "round":
                self.settled[site] = sorted(self._given(phase).keys() - self._shared(phase).keys())

        asked = exchange.asked
        refused: dict[str, Missing] = {}  # are not asked again: they would be refused again
        for attempt in count(1):
            try:
                exchange.missing = {**refused, **self.transport.ask(asked, outgoing, receive, rules.timeout)}
            except Aborted as error:
                silent = ", ".join(site for site in asked if site not in exchange.replies)
                raise Aborted(f"{error} before {silent} answered") from error
            for site in exchange.missing:  # it may have lost what it had
                self.settled.pop(site, None)
            asked = self._worth_asking(exchange, attempt, time.monotonic() - started)
            if not asked:
                break
            refused = {site: gone for site, gone in exchange.missing.items() if site not in asked}
            self.transport.pause(RETRY_PAUSE)
        return exchange

    def _worth_asking(self, exchange: Exchange, attempt: int, waited: float) -> list[str]:
        """Who may answer yet: under `wait` whoever is lost, and whose trainer died; under `stop` the latter, once."""
        rules = self.plan.participation
        if waited + RETRY_PAUSE > rules.patience:
            return []
        lost = rules.when_missing == "wait"
        died = lost or (rules.when_missing == "stop" and attempt == 1)
        return sorted(
            site for site, gone in exchange.missing.items() if (gone.passing and died) or (gone.kind == "lost" and lost)
        )

    def _breach(self, exchange: Exchange, where: str) -> str | None:
        """How an exchange breaks what the plan agreed on; None when it doesn't."""
        needed, required = self.sites, self.required
        if self.plan.participation.when_missing == "stop":
            needed, required = exchange.asked, len(exchange.asked)
        replies = len(exchange.replies.keys() & set(needed))
        if replies >= required:
            return None
        causes: dict[str, list[str]] = {}
        for site, gone in sorted(exchange.missing.items()):
            causes.setdefault(f"{gone.kind}: {gone.reason}", []).append(site)
        reasons = "; ".join(f"{', '.join(sites)} {cause}" for cause, sites in causes.items())
        answered = f"{replies} of {len(needed)} sites answered"
        return f"{where}: {answered}, the plan needs {required}: {reasons}"

    def _payload(self, site: str, phase: str) -> Groups:
        known = self.settled.get(site, [])
        return {group: self._current(group, site) for group in self._given(phase) if group not in known}

    def _current(self, group: str, site: str) -> dict[str, Tensor]:
        """What a site gets of a group; one that does not train gets what all have in common."""
        if site not in self.sites and group in self.plan.method.stand_in:
            return self.mixers[self.plan.method.stand_in[group]].current(self.sites[0])
        mixer = self.mixers[group]
        return mixer.current(self.sites[0] if isinstance(mixer, WeightedMean) else site)

    def _told(self, task: str, site: str) -> dict[str, Any]:
        """What a site has to know: the last round it is part of, and what there is to know of a super model."""
        mine = [record["round"] for record in self.rounds if site in record["answered"]]
        told: dict[str, Any] = {"last": max(mine, default=0)}
        if self.choice and task == "deliver":
            told["shown"] = sorted({site} | (self.agreed if site in self.agreed else set()))
        if self.choice and task == "test":
            told["curve"] = self.curve
            told["spacing"] = self.spacing and [list(ends) for ends in self.spacing]
        return told

    def _trained(self, exchange: Exchange) -> dict[str, Parcel]:
        """The answers of the sites that train."""
        return {site: reply for site, reply in exchange.replies.items() if site in self.sites}

    # ------------------------------------------------------------------ accepting
    def _check(self, site: str, reply: Parcel, task: str, number: int, exchange: Exchange) -> None:
        """Refuse an answer that is not what was asked for; nothing of it has entered a sum yet."""
        facts = reply.facts
        if site not in (self.sites if task == "round" else self.everyone):
            raise Refused(f"{site} is not a site of this study")
        if site in exchange.replies:
            raise Refused(f"{site} answered twice; the first answer counts")
        if facts.get("study") != self.study or facts.get("task") != task or facts.get("round") != number:
            raise Refused(
                f"answers {facts.get('task')} {facts.get('round')} of a study, not {task} {number} of this one"
            )
        check_package(facts.get("package"), package_facts())
        for name in ("seconds", "memory"):
            if not is_number(facts.get(name)):
                raise Refused(f"its {name}: {facts.get(name)!r} is not a number")
        check_metrics(reply.metrics, METRICS[task])
        check_warnings(facts.get("warnings"))
        if task == "round":
            samples = reply.samples
            if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= MOST_SAMPLES:
                raise Refused(f"sample count {samples!r} is not between 1 and {MOST_SAMPLES}")
        if facts.get("withheld") not in ([], ["validation"], ["test"], ["validation", "test"]):
            raise Refused(f"it withholds {facts.get('withheld')!r}, not the scores of a part of its data")
        if task == "test":
            check_counts(facts.get("counts"), self.plan.task.layout)
        if task == "join":
            check_classes(facts.get("classes"), facts["cases"], self.plan.task.classes)
        if task == "join" and not isinstance(facts.get("shares"), bool):
            raise Refused(f"it says {facts.get('shares')!r} to sharing its personal model, not true or false")
        if self.choice and task in ("deliver", "test"):
            thresholds = len(THRESHOLDS) if (task, self.choice.rule) == ("deliver", "threshold") else 0
            part = "test" if task == "test" else "validation"
            ending.check(facts.get(ending.FACT), self.sites, thresholds, part in facts["withheld"])
        self._check_groups(reply.groups, self.plan.phase_of(number) if task == "round" else None)

    def _check_groups(self, groups: Groups, phase: str | None) -> None:
        expected = self._shared(phase) if phase else {}
        same_layout(groups, expected)
        for group, layout in expected.items():
            for name, like in layout.items():
                tensor = groups[group][name]
                if tensor.dtype != like.dtype:
                    raise Refused(f"{group}/{name} has dtype {tensor.dtype}, expected {like.dtype}")
                if not is_finite(tensor):
                    raise Refused(f"{group}/{name} holds NaN or infinity; training diverged at this site")
        if phase:
            self.plan.method.examine(groups, phase)

    def _shared(self, phase: str) -> Groups:
        """What travels in a phase: its layout, without values."""
        return self._packed(self.plan.method.shared(self.layout, phase))

    def _packed(self, groups: Groups) -> Groups:
        pack = self.plan.transport.packed
        return {group: {name: pack(tensor) for name, tensor in tensors.items()} for group, tensors in groups.items()}

    def _given(self, phase: str) -> Groups:
        """What sites are given in a phase: its layout, without values."""
        return self.plan.method.given(self.layout, phase)

    # ------------------------------------------------------------------ the server's memory
    def _open_mixers(self, number: int) -> None:
        """Begin a round of its phase's mixers."""
        if self.plan.stage_of(number) != self.stage:
            self._enter(self.plan.phase_of(number))
            self.stage = self.plan.stage_of(number)
        for group in self._shared(self.plan.phase_of(number)):
            self.mixers[group].start(self.sites)

    def _enter(self, phase: str, prepare: bool = True) -> None:
        """Make the mixers of a phase that begins: they may depend on what came of the phases before.

        A group that travels for the first time gets its initial values, any other goes on with what it has.
        """
        method = self.plan.method
        given, shared = self._given(phase).keys(), self._shared(phase).keys()
        travelling = given | shared
        initial: Groups = {}
        if not travelling <= set(self.mixers):
            networks = self.plan.build_networks()
            if prepare:
                self.details |= method.prepare(networks, self._headquarters())
            initial = self._packed(method.given(networks, phase) | method.shared(networks, phase))
        for group in sorted(travelling):
            mixer = method.mixer(group, self.mixers, self.sites)
            mixer.agreed = self.agreed
            if isinstance(mixer, WeightedMean):
                mixer.let_wait(self.settings.waiting_memory << 20)
            if group in self.mixers:
                mixer.load_state(*self.mixers[group].state())
            else:
                mixer.start(self.sites, initial[group])
            self.mixers[group] = mixer
        for group in self.only_given - travelling:  # nobody will ask for these again
            self.mixers.pop(group, None)
        self.only_given = set(given - shared)

    def _headquarters(self) -> Headquarters:
        plan = self.plan
        compute, data = self.settings.compute(), self.settings.data
        stop = partial(self.transport.pause, 0.0)
        return Headquarters(self.sites, self.mixers, plan.task, plan.training, plan.seed, compute, data, stop)

    def _selects(self) -> bool:
        return not self.personal and self.plan.tracking.select == "best"

    def _consider_best(self, exchange: Exchange, rounds: int) -> None:
        """Keep the model after so many rounds when its mean validation score is strictly greater than the best so far.

        The mean is over the sites that scored both, so that a site's absence makes no model look better. A site with
        fewer cases than it tells of has no say.
        """
        known = {
            site: reply.metrics["validation"]
            for site, reply in exchange.replies.items()
            if "validation" not in reply.facts["withheld"]
        }
        scores = {site: score for site, score in known.items() if score is not None}
        if not self._selects() or not scores or len(scores) < len(known) or not self.plan.may_be_chosen(rounds):
            return
        if self.best is not None:
            both = scores.keys() & self.best["scores"].keys()
            if sum(scores[site] for site in both) <= sum(self.best["scores"][site] for site in both):
                return
        self.record.keep_as_best(rounds)
        self.best = {"round": rounds, "scores": scores}

    def _save(self) -> None:
        """Begin to write a checkpoint; the next round begins meanwhile. `_written` comes before what depends on it.

        Mixers never change tensors that they gave out, so what is being written stays as it is.
        """
        tensors: dict[str, Kept] = {}
        facts: dict[str, Any] = {
            "plan": self.plan.hash,
            "sites": self.sites,
            "best": self.best,
            "settled": self.settled,
            "details": self.details,
            "mixers": {},
        }
        for group, mixer in self.mixers.items():
            state, facts["mixers"][group] = mixer.state()
            tensors |= {f"{group}/{name}": tensor for name, tensor in state.items()}
        self.writing = self.writer.submit(self.record.save_checkpoint, self.done, tensors, facts)

    def _written(self) -> None:
        """Wait for the checkpoint that is being written; raises what went wrong with it."""
        writing, self.writing = self.writing, None
        if writing:
            writing.result()

    def _restore(self) -> None:
        self.record.sweep()
        tensors, facts = self.record.load_checkpoint()
        if facts["plan"] != self.plan.hash:
            raise MedsiloError("the checkpoint belongs to another plan; resume with the plan.yaml of its run folder")
        if facts["sites"] != self.sites:
            raise MedsiloError(f"the checkpoint's sites were {', '.join(facts['sites'])}; resume with the same sites")
        if facts["round"] > self.plan.rounds:
            raise MedsiloError("the checkpoint is of a round that the plan does not have; it is damaged, begin anew")
        for number in range(1, max(facts["round"], 1) + 1):  # the mixers of every phase so far, in their order
            if self.plan.stage_of(number) != self.stage:
                self._enter(self.plan.phase_of(number), prepare=False)
                self.stage = self.plan.stage_of(number)
                self._take_over(tensors, facts, facts["mixers"])  # at once: the next phase's mixers may depend on it
        self.details, self.settled = facts["details"], facts["settled"]
        self.done = facts["round"]
        self.best = facts["best"]
        self.rounds = self.record.forget_after(self.done)

    def _take_over(self, tensors: dict[str, Tensor], facts: dict[str, Any], groups: Iterable[str]) -> None:
        """Put a checkpoint's values of these groups into their mixers; those of phases to come have none yet."""
        for group in self.mixers.keys() & set(groups):
            prefix = f"{group}/"
            mine = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            self.mixers[group].load_state(mine, facts["mixers"][group])

    def _save_global(self, which: str, rounds: int) -> None:
        networks = self.plan.build_networks()
        method, phase = self.plan.method, self.plan.last_phase
        groups = method.given(networks, phase)
        for group, tensors in groups.items():
            values = self.mixers[group].current(self.sites[0])
            for name, tensor in tensors.items():
                tensor.copy_(values[name])
        method.received(networks, groups, phase)
        common = method.common(networks, phase)
        assert common is not None
        facts = {"round": rounds, "method": self.plan.algorithm.name, "plan_hash": self.plan.hash}
        self.record.save_global(which, method.whole(common).state_dict(), facts)
        draw_amplitude(method.input_layer(networks), self.record.folder / AMPLITUDE)


def _chosen(exchange: Exchange) -> dict[str, dict[str, int]]:
    """How often each model answered, by site."""
    return {site: reply.facts[ending.FACT]["chosen"] for site, reply in sorted(exchange.replies.items())}
