"""Commands that say what there is and what leaves, before anything runs, and decide: approve, leak-report, list."""

import ast
import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medsilo.cli import options
from medsilo.cli.options import option
from medsilo.cli.show import Console
from medsilo.core.errors import MedsiloError
from medsilo.core.text import counted, plain
from medsilo.registry import PluginTable

if TYPE_CHECKING:
    from medsilo.check.at_home import KitAtHome
    from medsilo.registry import Registry
    from medsilo.site.approvals import ApprovalLimits, AskingPlan, Decision, DecisionKind

HEXADECIMAL = "0123456789abcdefABCDEF"
LINK, REFERENCE = re.compile(r"\[([^]]*)\]\([^)]*\)"), re.compile(r" \(\[[^]]*\]\([^)]*\)\)")  # in Markdown
SAID = {"when": "worth a try", "leaves": "leaves a hospital", "bytes": "bytes a round", "work": "extra work"}
# What serves a hospital's own page on its machine: gets the kit and a port, and returns a server.
PAGES, SITE_PAGE = PluginTable("medsilo.pages", "types:FunctionType", {}), "site"
HOURS = {"h": 1, "d": 24, "w": 168}
INDENT = " " * 14  # of what belongs to a plan, below its hash


def lasting(value: object) -> int:
    """Return the hours of a time like 12h, 30d or 8w."""
    text = str(value).strip().lower()
    number, unit = text[:-1], text[-1:]
    if unit not in HOURS or not number.isdecimal() or not 0 < int(number) <= 100_000:
        raise ValueError(f"{text!r} is not a time; write hours, days or weeks: 12h, 30d, 8w")
    return int(number) * HOURS[unit]


def approve(
    screen: Console,
    hash: Annotated[
        str | None,
        typer.Argument(
            metavar="PLAN",
            help="a job's folder, the plan's hash, or the first digits of the hash of a plan that asked here",
        ),
    ] = None,
    *,
    kit: Annotated[Path, option("KIT", options.SITES_KIT)],
    changes: options.Changes,
    expires: Annotated[
        int | None, option("TIME", "maximum duration: 12h, 30d or 8w (default: no end)", parser=lasting)
    ] = None,
    rounds: Annotated[
        int | None,
        option("N", "answer at most N rounds of this plan, over all its studies", min=1),
    ] = None,
    sites: Annotated[str, option("SITE,SITE", "only these hospitals may take part")] = "",
    decline: Annotated[bool, typer.Option("--decline", help="reject the plan, or withdraw its approval")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="approve without asking, on a terminal, too")] = False,
    by: Annotated[str, option("NAME", "who decides (default: this account's name)")] = "",
    page: Annotated[
        bool, typer.Option("--page", help="serve a page on this machine to read plans, decide, and watch studies")
    ] = False,
    port: Annotated[int, option("PORT", "port of the page; 0: any free port", min=0, max=65_535)] = 0,
) -> None:
    """At a hospital: approve or decline a plan, or list the plans that asked to run here.

    With 'approval: required' in medsilo.yaml, no other plan runs. The kit's key signs each decision, and the last one
    counts. Without a plan, the command lists the plans that asked and all decisions. On a terminal, it shows the plan
    and what would leave, and asks before it approves. --decline rejects a plan, or
    withdraws its approval: the study stops here before its next answer leaves. What has left can not be taken back.
    --page serves a page at a one-time address until Ctrl-C; studies go on.
    """
    from medsilo.site.approvals import ApprovalLimits

    if page:
        _show_page(screen, kit, port)
    elif hash is not None:
        limits = ApprovalLimits.lasting(expires, rounds, sites)
        if decline and limits.words():
            raise MedsiloError("a plan that is declined has no limits; leave --decline or the limits out")
        _decide(screen, "declined" if decline else "approved", kit, hash, by, limits, changes, yes)
    elif decline:
        raise MedsiloError("which plan? give a job or the beginning of a hash")
    else:
        _list(screen, kit)


def _list(screen: Console, kit: Path) -> None:
    from medsilo.check.at_home import KitAtHome
    from medsilo.site.accepted_settings import moment
    from medsilo.site.approvals import study_in_words

    home = KitAtHome.read(kit)
    decided, asked = home.approvals.decisions(), home.approvals.asked()
    last = {one.plan: one for one in decided}
    screen.say(f"approval: {home.settings.approval}" + ("" if decided or asked else "; no plan has asked yet"))
    for one in asked:
        verdict = last[one.hash].verdict if one.hash in last else "waits for a decision"
        parts = [str(one.plan.get(key, {}).get("name", "")) for key in ("algorithm", "task")]
        names = "a canary on synthetic data" if one.is_canary else ", ".join(parts)
        by = f", submitted by {one.lead}" if one.lead else ""
        screen.say(f"{one.hash[:12]}  {verdict}: {names}, study {one.study or '–'}{by}, asked {moment(one.at)}")
        if one.hash not in last:
            screen.say(*(f"{INDENT}{name}: {words}" for name, words in study_in_words(one.plan.get("study", {}))))
    screen.say(*map(_line, decided))
    screen.answer(
        approval=home.settings.approval,
        asked=[one.model_dump(mode="json", exclude={"plan"}) for one in asked],
        decisions=[one.model_dump(mode="json") for one in decided],
    )


def _show_page(screen: Console, kit: Path, port: int) -> None:
    screen.in_lines = True
    if SITE_PAGE not in PAGES:
        raise MedsiloError("the package medsilo_page is not installed; decide without --page")
    try:
        server = PAGES[SITE_PAGE](kit, port)
    except OSError as error:
        raise MedsiloError(f"port {port} of this machine can't be used; give another --port, or none") from error
    screen.say(f"open this address in a browser on this machine; it is good for one use:\n{server.gate.start}")
    screen.event("ready", {"address": server.gate.start})
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        screen.say("the page has ended; studies go on")


def _decide(
    screen: Console,
    verdict: "DecisionKind",
    kit: Path,
    given: str,
    by: str,
    limits: "ApprovalLimits",
    changes: Sequence[str],
    yes: bool,
) -> None:
    import getpass

    from medsilo.check.at_home import KitAtHome
    from medsilo.runs.fields import SCRIPT

    home = KitAtHome.read(kit)
    meant, asked = _meant(home, given, changes)
    if asked and asked.plan["task"]["name"] == SCRIPT:
        raise MedsiloError(
            "a script of the job's own trains by this plan, and asks nobody; allow or refuse the job's code itself "
            "(byoc in the kit's local/authorization.json)"
        )
    if asked and verdict == "approved":  # the others need no plan that can be read
        from medsilo.check.approving import never_runs, plan_in_words
        from medsilo.check.disclosure import left_in_short
        from medsilo.flare.jobs import find_job, has_code

        carries_code = bool(given.strip(HEXADECIMAL)) and has_code(find_job(given))
        plan = home.plan_of(asked)
        if why := never_runs(home, plan, limits, asked.sites):
            raise MedsiloError(f"it would never run here: {why}; nothing is approved")
        screen.say(*(f"{name}: {words}" for name, words in plan_in_words(plan)), "What leaves this hospital:")
        screen.say(*(f"{INDENT}{line}" for line in left_in_short(plan, carries_code)))
        if screen.watched and sys.stdin.isatty() and not (yes or typer.confirm(f"Approve plan {meant[:12]}?")):
            raise MedsiloError("nothing is approved, as you answered; --decline rejects the plan")
    if asked and given.strip(HEXADECIMAL):
        home.approvals.keep(asked)  # also a plan that did not ask
    before = home.approvals.last(meant)
    if verdict == "declined" and before and before.verdict == "approved":
        verdict = "withdrawn"
    code = home.code_of(asked) if verdict == "approved" else {}
    decision = home.approvals.decide(meant, verdict, by or getpass.getuser(), limits, code)
    screen.say(_line(decision))
    if verdict == "approved" and home.settings.approval == "none":
        screen.warn("medsilo.yaml has no 'approval: required', so plans without an approval run here, too")
    screen.answer(**decision.model_dump(mode="json"))


def _meant(home: "KitAtHome", given: str, changes: Sequence[str]) -> "tuple[str, AskingPlan | None]":
    """Return the hash of the plan that is meant, and the plan where it is here."""
    import time

    from medsilo.flare.jobs import find_job, plan_of
    from medsilo.site.approvals import AskingPlan

    if given.strip(HEXADECIMAL):
        plan = plan_of(find_job(given), changes, allowed=home.settings.packages)
        asked = AskingPlan(plan=plan.resolved(), hash=plan.hash, at=int(time.time()))
        return asked.hash, asked
    if changes:
        raise MedsiloError(
            "--set changes a job's plan, and a hash names an unchanged one; give the job's folder, or leave out --set"
        )
    meant, found = given.lower(), home.approvals.asked(given.lower())
    if len(meant) == 64:  # which need not have asked
        return meant, found[0] if found else None
    if len(meant) < 8 or len(found) != 1:
        raise MedsiloError(
            f"{plain(given, 70)} begins the hash of {counted(len(found), 'plan')} that asked here; give 8 digits at "
            "least, or all 64, or the job itself"
        )
    return found[0].hash, found[0]


def _line(decision: "Decision") -> str:
    from medsilo.site.accepted_settings import moment

    limits = "".join(f", {words}" for words in decision.limits.words())
    return f"{decision.plan}  {decision.verdict} by {decision.by}, {moment(decision.at)}{limits}"


def disclosure(
    screen: Console,
    job: options.Job,
    *,
    plan: options.PlanFile = None,
    changes: options.Changes,
    kit: options.SiteKit = None,
    local: options.SiteConfig = None,
) -> None:
    """Say what leaves a site under a job, before anything runs.

    The disclosure report lists every group of tensors with its bytes, and every number that a site sends.
    docs/trust/privacy.md has the promises.
    """
    folder = options.folder_of_settings(local, kit)
    screen.note("reading the plan")
    import dataclasses

    from medsilo.check.disclosure import describe, leaks
    from medsilo.flare.jobs import find_job, has_code, plan_of, scope_of
    from medsilo.registry import ANY
    from medsilo.site.policy import Policy
    from medsilo.site.settings import SiteSettings

    found = find_job(job)
    settings = SiteSettings.read(folder) if folder else SiteSettings(packages=ANY)
    study = plan_of(found, changes, plan, settings.packages)
    policy = Policy.read(folder, scope_of(found)) if folder else Policy()
    lines = describe(study, settings, policy, has_code(found))
    screen.say(*lines)
    groups = [{**dataclasses.asdict(leak), "leaves": policy.lets_out(leak.group)} for leak in leaks(study)]
    screen.answer(plan=study.hash, groups=groups, lines=lines)


def list_(
    screen: Console,
    method: Annotated[str | None, typer.Argument(metavar="METHOD", help="one method: its idea, keys and cost")] = None,
) -> None:
    """List the methods, each with when to try it and what leaves a hospital, and the tasks.

    A plan names them as algorithm.name and task.name. With a METHOD: its idea, when to try it, its keys, and its cost.
    """
    if method:
        screen.note("loading the method")
        _show_method(screen, method)
        return
    from medsilo.check.method_facts import FACTS
    from medsilo.registry import METHODS, TASKS

    methods = [
        {
            "name": name,
            "title": _title_of(METHODS, name),
            "when": _plain(FACTS[name][3]) if name in FACTS else "",
            "leaves": FACTS[name][0].partition(";")[0] if name in FACTS else "",
        }
        for name in METHODS
    ]
    width = max(len(one["title"]) for one in methods)
    screen.say("methods, as algorithm.name of a plan (medsilo list METHOD: idea, when to try it, keys, cost)")
    screen.say(
        *(
            "{name:<14} {title:<{width}} ".format(**one, width=width)
            + "; leaves: ".join(filter(None, (one["when"], one["leaves"])))
            for one in methods
        )
    )
    screen.say("run central with --engine inprocess, or beside others: medsilo compare --methods central,fedavg")
    tasks = [{"name": name, "title": _title_of(TASKS, name)} for name in TASKS]
    screen.say("tasks, as task.name of a plan")
    screen.say(*("{name:<19} {title}".format(**one) for one in tasks))
    screen.answer(methods=methods, tasks=tasks)


def _title_of(table: "Registry", name: str) -> str:
    """Return the title of a class as its source has it. Nothing is imported, and of other packages nothing read."""
    if package := table.package_of(name):
        return f"of package {package}"
    module, _, kind = table.place_of(name).partition(":")
    spec = find_spec(module)
    tree = ast.parse(Path(spec.origin).read_text("utf-8") if spec and spec.origin else "")
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind), [])
    for node in (node for node in body if isinstance(node, ast.Assign | ast.AnnAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and target.id == "title" and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    return name


def _show_method(screen: Console, name: str) -> None:
    """Show one method."""
    import inspect
    from difflib import get_close_matches

    from medsilo.check.disclosure import leaving
    from medsilo.check.method_facts import FACTS
    from medsilo.registry import METHODS

    if name not in METHODS:
        near = get_close_matches(name.lower(), list(METHODS), 1)
        hint = f"did you mean {near[0]}?" if near else "'medsilo list' has all of them"
        raise MedsiloError(f"{name!r} is not a method; {hint}")
    own = METHODS[name]
    _, sent, work, when = FACTS.get(name, ("", "", "", ""))
    keys = {
        f"algorithm.{key}": {"default": _default_of(field.default), "meaning": _plain(_meaning_of(own, key))}
        for key, field in own.model_fields.items()
        if key != "name"
    }
    facts = {"when": when, "leaves": leaving(own()), "bytes": sent and f"{sent} (FedAvg: 1)", "work": work}
    facts = {what: _plain(told) for what, told in facts.items() if told}
    idea = inspect.cleandoc(own.__doc__ or "")
    screen.say(f"{own.title}, {own.paper}", "", idea, "")
    screen.say(*(f"{SAID[what]}: {told}" for what, told in facts.items()))
    screen.say(*(["", "keys"] if keys else []))
    screen.say(*(f"  {key} ({one['default']}): {one['meaning']}" for key, one in keys.items()))
    screen.answer(name=name, title=own.title, paper=own.paper, idea=idea, keys=keys, **facts)


def _plain(text: str) -> str:
    """Return a text of Markdown without links."""
    return LINK.sub(r"\1", REFERENCE.sub("", text))


def _default_of(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _meaning_of(kind: Any, key: str) -> str:
    """Return what a key means: said where it was first declared."""
    fields = (getattr(base, "model_fields", {}).get(key) for base in kind.__mro__)
    return next((field.description for field in fields if field and field.description), "")
