"""Register secure aggregation, which uses pairwise masks, in the engine: check plans, and create the objects for server
and sites.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from medsilo.core.errors import MedsiloError
from medsilo.core.tensors import Groups, Modules
from medsilo.learning.compute import Compute
from medsilo.mixing.aggregators import aggregator_of
from medsilo.mixing.mean_forms import Form, ServerReadable
from medsilo.schedule.phase import Group, Phase, ServerSide, views
from medsilo.schedule.sealing import SecureAggregation
from medsilo_secagg.sealed_rounds import Blocks, terms_of, threshold_of

if TYPE_CHECKING:
    from medsilo.federation.site_context import SiteContext
    from medsilo_secagg.sealed_site import SealedSite

LEAST_SEALED = 3  # minimum number of hospitals in a round
# methods of an aggregator's class that determine the result of aggregation
MAKES = {"_take", "_merge", "_fold", "_rule"}
SUMS = (
    "Secure aggregation (pairwise): a server that follows the protocol learns sums over hospitals, as long as fewer "
    "hospitals than the threshold help it. Against a server that lies only differential privacy protects."
)
OPEN = (
    "With or without it, the server knows the means, case counts, scores, losses, and when each hospital answered. It "
    "also sees tensors of whole numbers, such as batch norm's counters. All hospitals but one can together calculate "
    "that one from a sum."
)


class Pairwise(SecureAggregation):
    """Hospitals add pairwise masks to their numbers, and the masks cancel in the sum. Secure aggregation protects
    against a server that follows the protocol but reads all messages.
    """

    name: Literal["pairwise"] = "pairwise"
    promises: ClassVar = (SUMS, OPEN)
    times_as_large: ClassVar = 4

    def conflicts(self, plan: Any, networks: Modules) -> Iterable[str]:
        """Yield the reasons why a plan cannot use secure aggregation: for example, because the server must read the
        updates.
        """
        name = plan.algorithm.name
        yield from _hospitals_that_cannot(plan)
        if plan.aggregation.robust or plan.aggregation.max_weight:
            yield (
                "aggregation: robust rules and shares compare what single hospitals sent, which sealing hides from the "
                "server; set aggregation.robust and aggregation.max_weight to null, or secure_aggregation.mode=none"
            )
        if plan.algorithm.pooled or not any(phase.sent for phase in plan.course.phases):
            yield f"secure_aggregation.mode: {name} sends no tensors, so there is nothing to seal; set none"
        for phase in plan.course.phases:
            forms = self.forms(plan, phase)
            for group in views(phase.sent, networks):
                if isinstance(form := forms[group], ServerReadable):
                    yield (
                        f"secure_aggregation.mode: {name}'s {group} can't be sealed: {form.why}; choose another method "
                        "(fedbn, fedsm), or set secure_aggregation.mode=none"
                    )

    def leaves(self, plan: Any) -> Iterable[str]:
        yield from self.promises
        if any(group.apply_locally for group in plan.course.delivery.given):
            yield "No personal model goes to another hospital, whatever share_personal_model says."

    def forms(self, plan: Any, phase: Phase) -> dict[str, Form]:
        """Return the kind of aggregation of each group of tensors in a phase.

        New aggregators are created, as at the beginning of a study, because the kind of aggregation must not depend on
        earlier rounds.
        """
        sites = plan.participation.sites
        server = ServerSide(sites, {}, {}, frozenset, plan.task, plan.training, plan.seed, Compute, None, lambda: None)
        return {group.name: _form(group, server) for group in phase.sent}

    def layout(self, plan: Any, phase: Phase, networks: Modules) -> Groups:
        blocks = Blocks(plan, terms_of(plan, "", sorted(plan.participation.sites)), 1)
        return {name: own.expected() for name, own in blocks.of(phase, networks).items()}

    def site(self, context: "SiteContext") -> "SealedSite":
        from medsilo_secagg.identity import signer_of
        from medsilo_secagg.sealed_site import SealedSite

        return SealedSite(context.plan, context.site, context.folder, signer_of(context.kit))


def _hospitals_that_cannot(plan: Any) -> Iterable[str]:
    participation = plan.participation
    named = len(participation.sites)
    if not named:
        yield "secure_aggregation: name the hospitals in participation.sites; else every connected site counts"
    if min(named, participation.required) < LEAST_SEALED:
        yield (
            f"secure_aggregation.mode: {participation.required} hospitals are enough for this plan, and it needs "
            f"{LEAST_SEALED} in every round, since each of two can calculate the other's model; name more hospitals, "
            f"raise participation.minimum, or set secure_aggregation.mode=none"
        )
    if plan.transport.precision == "bfloat16":
        yield "transport.precision: masked numbers are integers, so bfloat16 only costs digits; set float32"
    threshold = threshold_of(plan.secure_aggregation, named)
    if not named < 2 * threshold <= 2 * named:
        yield (
            f"secure_aggregation.threshold: {threshold}; for {named} hospitals it must be from {named // 2 + 1} to "
            f"{named}: then some hospital has helped with any two sums of a round, and refuses the second"
        )
    if participation.required < threshold:
        yield (
            f"participation.minimum: {participation.required} hospitals can't open a sum whose threshold is "
            f"{threshold}; raise it"
        )


def form_of(aggregator: Any) -> Form:
    """Return the kind of aggregation, such as a mean, with which an aggregator works under secure aggregation.

    A subclass that overrides a method of `MAKES` must define the attribute `sealed`, even if the base class defines
    `sealed`.
    """
    for kind in type(aggregator).__mro__:
        if "sealed" in vars(kind):
            form: Form = aggregator.sealed
            return form
        if MAKES & vars(kind).keys():
            break
    return ServerReadable(f"{type(aggregator).__name__} does not say how it works on sums that the server cannot read")


def _form(group: Group, server: ServerSide) -> Form:
    try:
        return form_of(aggregator_of(group.mix, server))
    except (LookupError, AttributeError, MedsiloError):
        return ServerReadable("its mixer is made of what came before, so how it is sealed is not known beforehand")
