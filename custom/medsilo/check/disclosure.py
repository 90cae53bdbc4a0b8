"""The disclosure report lists all tensors and numbers that leave a site under a plan."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from medsilo.check.approval import UNAPPROVED
from medsilo.check.demands import floors_beside, price_list
from medsilo.check.own_data_set import data_set_table
from medsilo.check.plan_words import words_table
from medsilo.check.result import aligned
from medsilo.check.script_report import script_lines
from medsilo.core.rounding import Resolution
from medsilo.core.tensors import packed
from medsilo.core.text import counted
from medsilo.federation.disclosure import CLASS, PAIR
from medsilo.federation.protection import planned_answers
from medsilo.learning.training import Training
from medsilo.plan import Plan
from medsilo.runs.disclosed import words_of
from medsilo.runs.messages import ALL_DISCLOSED, DISCLOSED, MOST_LOSS, SiteAnswer, declared
from medsilo.schedule.algorithm import Algorithm
from medsilo.schedule.phase import views
from medsilo.site.kit import KitFiles
from medsilo.site.policy import Policy
from medsilo.site.query_budget import PARTS
from medsilo.site.settings import SCORE_ROUNDING, DataPart, SiteSettings
from medsilo.tasks.metrics import BINS, BROAD, BY_PATIENT, CHANCES, CONFUSION, RELIABILITY

COUNTED = {
    CONFUSION: "how often each class was found to be each: {} counts",
    CHANCES: "histograms of each class's probability: {} counts, for the area under the curve",
    RELIABILITY: "sums of probabilities, by tenths of them: {} numbers, for calibration",
}
BESIDE = "Numbers of cases, losses, scores and running times leave, too, as far as the hospital discloses them."
STAYS = "No image, no label of a case, no file name, no patient's name leaves."
BY_CODE = (
    "The job brings code of its own, which decides what leaves. medsilo can not tell what, and this hospital's limits "
    "do not hold for it. Read the code; then approve the plan with it, or decline ('medsilo approve')."
)
NO_PART = {
    "observe": "This hospital only observes (takes_part), so it rejects this plan, and nothing of what follows leaves.",
    "test": "This hospital trains nothing (takes_part). Where the plan names it under participation.evaluation_sites, "
    "only scores and numbers of test cases leave of what follows; else it rejects the plan.",
}
REMEDIES = "What can be done about each: medsilo.yaml, privacy.json, resources.json (medsilo docs study/join)."


@dataclass(frozen=True)
class Leak:
    """A group of tensors that a site sends in every round from round `first` to round `last`."""

    first: int
    last: int
    phase: str
    group: str
    tensors: tuple[str, ...]
    bytes: int

    @property
    def rounds(self) -> int:
        return self.last - self.first + 1

    @property
    def when(self) -> str:
        return str(self.first) if self.rounds == 1 else f"{self.first} to {self.last}"


def leaks(plan: Plan) -> list[Leak]:
    modules, secure = plan.layout(), plan.secure_aggregation.implementation
    found = []
    for stretch in plan.course.stretches():
        sealed = secure.layout(plan, stretch.phase, modules) if secure else {}
        for group, tensors in views(stretch.phase.sent, modules).items():
            size = sum(
                packed(tensor, plan.transport.precision).nbytes for tensor in sealed.get(group, tensors).values()
            )
            found.append(Leak(stretch.first, stretch.last, stretch.phase.name, group, tuple(tensors), size))
    return found


def leaving(algorithm: Algorithm) -> str:
    """Return the titles of the tensor groups that sites send if the method's options have their default values."""
    if algorithm.pooled:
        return "all data are pooled"
    sent = (group for stretch in algorithm.course(Training()).stretches() for group in stretch.phase.sent)
    return ", ".join(dict.fromkeys(group.title or group.name for group in sent)) or "nothing"


def told_besides(plan: Plan) -> list[str]:
    """Return a line for each number or tensor that the method discloses in addition to trained weights and scores."""
    modules = plan.layout()
    lines: list[str] = []
    for stretch in plan.course.stretches():
        lines += stretch.phase.disclosure_notes
        sent = views(stretch.phase.sent, modules)
        lines += (
            line
            for group in stretch.phase.sent
            if group.name in sent
            for line in group.disclosure_notes(sent[group.name])
        )
    return list(dict.fromkeys([*lines, *plan.algorithm.outcome.disclosure_notes()]))


def describe(
    plan: Plan,
    settings: SiteSettings,
    policy: Policy | None = None,
    carries_code: bool = False,
    kit: KitFiles | None = None,
) -> list[str]:
    """Return the disclosure report of a plan at a site, as lines of text."""
    found, own = leaks(plan), policy or Policy()
    if plan.task.scripted:  # medsilo neither rounds nor suppresses the numbers of a training script
        settings, carries_code = settings.model_copy(update={"public_data": True, "min_patients_per_metric": 1}), True
    prices = aligned([("what", "price"), *price_list(plan, settings)])
    parts = [
        [NO_PART[settings.takes_part]] if settings.takes_part in NO_PART else [],
        [f"What leaves a site under {plan.algorithm.title}, task {plan.task.name} (plan {plan.hash[:12]})"],
        [] if plan.task.synthetic else [line for table in data_set_table(settings, kit) for line in table.as_text()],
        [f"{UNAPPROVED}."] if settings.approval == "none" and settings.protects(plan.task.synthetic) else [],
        _groups(found, own) if found else ["no tensor"],
        through_features(plan) if found else [],
        _numbers(plan, settings),
        _coarse(plan, settings) if settings.protects(plan.task.synthetic) else [],
        ["What each costs (medsilo docs trust/privacy):", *prices] if plan.privacy or settings.privacy else [],
        told_besides(plan),
        list(_averages(plan, settings)),
        _logs(own),
        [BY_CODE if carries_code else STAYS],
        script_lines(plan) if plan.task.scripted else [],
        words_table(plan).as_text(),
        [REMEDIES],
        _filters(policy) if policy else [],
    ]
    return [line for part in parts if part for line in ("", *part)][1:]


def left_in_short(plan: Plan, carries_code: bool = False) -> list[str]:
    """Summarise what each site discloses under a plan, for readers who do not know tensors or bytes."""
    trained = "generated cases" if plan.task.synthetic else "this hospital's patients"
    return [
        f"How training on {trained} changed the network, over {counted(plan.rounds, 'round')}: "
        f"{leaving(plan.algorithm)}.",
        *through_features(plan),
        *told_besides(plan),
        BESIDE,
        *([BY_CODE] if carries_code else []),
        *(script_lines(plan) if plan.task.scripted else []),
    ]


def through_features(plan: Plan) -> list[str]:
    return [line for feature in plan.features for line in feature.leaves(plan)]


def _groups(leaks: list[Leak], policy: Policy) -> list[str]:
    rows = [("rounds", "group", "tensors", "bytes a round", "bytes in all", "here")]
    for leak in leaks:
        verdict = "leaves" if policy.lets_out(leak.group) else "REFUSED by privacy.json"
        count = str(len(leak.tensors))
        rows.append((leak.when, leak.group, count, f"{leak.bytes:,}", f"{leak.bytes * leak.rounds:,}", verdict))
    return aligned(rows)


def _numbers(plan: Plan, settings: SiteSettings) -> list[str]:
    least = settings.least(plan.task.synthetic)
    few = f", unless they are fewer than {least}" if least > 1 else ""
    whose, times = ("patients", CLASS) if settings.protects(plan.task.synthetic) else ("cases", 1)
    where = f", where each that occurs has {least} {whose}" if least > 1 else ""
    every = plan.model_selection.validate_every
    scored = f"after every {every} rounds and the last " if every > 1 else ""
    scores = f"{_means('validation')} over the validation cases{few}"
    counts = f"{declared('counts').words} that add up over sites{few}"
    lines = [
        f"With every answer: {', '.join(_with_every_answer()).format(packages=', '.join(plan.code))}.",
        f"On joining: {'; '.join(_on_joining(where if plan.task.goal.classifies else None))}.",
        f"In every round: the training {_means('train')}; {scored}{scores}.",
        f"At the end: {_means('test')} over the test cases, and {counts}:",
    ]
    for name, length in plan.task.goal.layout.items():
        summed = f"the sum over {'patients' if name.endswith(BY_PATIENT) else 'cases'} and their number"
        lines.append(f"  {name}: {COUNTED.get(name, summed).format(length)}")
    if CONFUSION in plan.task.goal.layout and least > 1:
        lines.append(
            f"  {CONFUSION}, {CHANCES} and {RELIABILITY} only where each class that occurs has "
            f"{times * least} test {whose}"
        )
    return [*lines, *_subgroups(plan, settings), *_threshold(plan, settings)]


def _with_every_answer() -> list[str]:
    common = [own for name, own in DISCLOSED["join"].items() if name in SiteAnswer.model_fields]
    # list numbers before versions and hashes
    return [own.words for own in sorted(common, key=lambda own: own.form == "other") if own.words]


def _on_joining(where: str | None) -> list[str]:
    """Return the names of the values that a site sends when joining.

    Args:
        where: the condition for sending counts of classes; None if the task has no classes
    """
    words = {name: own.words for name, own in DISCLOSED["join"].items() if name not in SiteAnswer.model_fields}
    shares, classes = words.pop("shares"), words.pop("classes")
    return [shares, *([] if where is None else [classes + where]), *words.values()]


def _means(part: DataPart) -> str:
    return words_of(own for own in ALL_DISCLOSED.values() if own.form == "mean" and own.part == part)


def _subgroups(plan: Plan, settings: SiteSettings) -> list[str]:
    declared = settings.data.subgroups if settings.data and not plan.task.synthetic else {}
    if not declared or plan.task.scripted:
        return []
    if plan.privacy or settings.privacy:
        return ["No score of a subgroup leaves: the study promises privacy."]
    named = "; ".join(f"{name}: {', '.join(own.words)}" for name, own in declared.items())
    return [
        f"At the end, too, of each level of these subgroups ({named}): patients, score and how far patients' scores "
        f"differ. None where they are fewer than {settings.least(False)}, or would let a score of fewer be worked out.",
    ]


def _threshold(plan: Plan, settings: SiteSettings) -> list[str]:
    if not plan.task.goal.decides:
        return []
    if not plan.has_threshold:
        return ["No threshold of validation cases leaves: the study promises privacy."]
    steps = BROAD if settings.protects(plan.task.synthetic) else BINS
    return [
        f"At the end, too: the threshold that does best on the validation cases, one of {steps - 1} numbers; it counts "
        "as an answer over validation cases."
    ]


def _coarse(plan: Plan, settings: SiteSettings) -> list[str]:
    """Describe how a site rounds numbers, how the data are split, and how many scored answers leave the site."""
    unit, patients = settings.count_unit(False), SCORE_ROUNDING
    low, high = plan.task.goal.metric_range
    steps = ", ".join(f"{Resolution(1 / number, patients).step(low, high):g} with {number}" for number in (10, 50, 200))
    lines = [
        f"Scores leave in steps that {patients} patients together can move at most ({steps} patients in the "
        f"part); losses likewise, a case counting for at most {MOST_LOSS:g}."
    ]
    if not plan.task.goal.by_case:
        lines.append(
            f"A score of pairs ({plan.task.goal.metric}) leaves in coarser steps, by the share of pairs that a "
            f"patient is in, and only where that is at most {PAIR} / min_patients_per_metric."
        )
    lines.append(
        f"Counts of patients leave in multiples of {unit} (min_patients_per_metric). In those of classes each patient "
        f"counts for one, divided among the classes of its cases. Numbers of cases leave in multiples of {unit} times "
        "those of the patient with most, in one digit."
    )
    if beside := floors_beside(plan, settings):
        lines.append(f"{beside[0]}; {beside[1]}.")
    elif plan.privacy:
        lines.append("Numbers that have noise leave neither in steps nor in multiples: noise takes their place here.")
    if plan.task.split_by_site:
        lines.append("This hospital decides by itself which patient is in which part; task.shares is not used.")
    planned = planned_answers(plan)
    told = ", ".join(f"{planned[part]} of {settings.most_answers(part)} over {part} cases" for part in PARTS)
    lines.append(f"The plan asks for so many of the answers with scores that one lead may have: {told}.")
    return lines


def _logs(policy: Policy) -> list[str]:
    log = "stays (allow_log_streaming is false in resources.json)"
    if policy.streams_logs:
        log = "streamed to the server while a job runs (allow_log_streaming)"
    return [
        "Error texts: in medsilo's own words, without file names; errors.log, which has the rest, stays.",
        "Warnings: one of a few kinds, with numbers of rounds and shares; the server has the words.",
        f"NVFlare's error log: {log}.",
    ]


def _filters(policy: Policy) -> list[str]:
    """Describe how the filters in the site's privacy.json change every answer of the site."""
    if policy.scope is None:
        return ["No privacy.json: nothing is held back or changed."]
    lines = [f"  {path.rpartition('.')[2]} {json.dumps(args)}" for path, args in policy.filters]
    return [f"privacy.json, scope {policy.scope}, does to every answer:", *(lines or ["  nothing"])]


def _averages(plan: Plan, settings: SiteSettings) -> Iterator[str]:
    """Yield a line for each group of tensors that consists of averages over a site's images."""
    for stretch in plan.course.stretches():
        once = stretch.first == stretch.last
        rounds = f"in round {stretch.first} only" if once else f"in rounds {stretch.first} to {stretch.last}"
        for group in stretch.phase.sent:
            if group.average:
                least = settings.least_averaged(plan.task.synthetic)
                told = f"It leaves where it covers {least} images and patients."
                yield f"{group.name}, {rounds}: {group.average.of}. {told}"
