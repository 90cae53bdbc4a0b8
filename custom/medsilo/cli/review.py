"""The commands approve, page, disclosure and list, with which people review a study before it runs."""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medsilo.cli import completion, options
from medsilo.cli.options import option
from medsilo.cli.show import Console
from medsilo.core.errors import MedsiloError
from medsilo.core.text import counted, plain
from medsilo.registry import PluginTable

if TYPE_CHECKING:
    from medsilo.check.hospital_checks import KitAtHome
    from medsilo.plan import Plan
    from medsilo.registry import Registry
    from medsilo.site.approvals import ApprovalLimits, AskingPlan, Decision, DecisionKind
    from medsilo.site.job_code import JobCode

HEXADECIMAL = "0123456789abcdefABCDEF"
LINK, REFERENCE = re.compile(r"\[([^]]*)\]\([^)]*\)"), re.compile(r" \(\[[^]]*\]\([^)]*\)\)")  # links in Markdown
SAID = {
    "when": "worth a try",
    "leaves": "leaves a hospital",
    "stays": "stays at a hospital",
    "bytes": "bytes a round",
    "work": "extra work",
}
# Plug-ins for a hospital's web page: functions that take a kit and a port, and return a server
PAGES, SITE_PAGE = PluginTable("medsilo.pages", "types:FunctionType", {}), "site"
HOURS = {"h": 1, "d": 24, "w": 168}
INDENT = " " * 14  # indentation of the lines below a plan's hash in the list of plans
QUOTED = "    | "  # prefix of printed code, so that nobody mistakes it for medsilo's output


def lasting(value: object) -> int:
    """Convert a duration such as 12h, 30d or 8w to a number of hours."""
    text = str(value).strip().lower()
    number, unit = text[:-1], text[-1:]
    if unit not in HOURS or not number.isdecimal() or not 0 < int(number) <= 100_000:
        raise ValueError(f"{text!r} is not a duration; write hours, days or weeks: 12h, 30d, 8w")
    return int(number) * HOURS[unit]


def approve(
    screen: Console,
    hash: Annotated[
        str | None,
        typer.Argument(
            metavar="PLAN",
            help="a job's folder, the plan's hash, or the first digits of the hash of a submitted plan",
        ),
    ] = None,
    *,
    kit: Annotated[Path, option("KIT", options.SITES_KIT)],
    changes: options.Changes,
    expires: Annotated[
        int | None, option("TIME", "how long the approval is valid: 12h, 30d or 8w (default: no end)", parser=lasting)
    ] = None,
    rounds: Annotated[
        int | None,
        option("N", "answer at most N rounds of this plan, counted over all its studies", min=1),
    ] = None,
    sites: Annotated[str, option("SITE,SITE", "approve the plan only if no other hospitals take part")] = "",
    decline: Annotated[
        bool, typer.Option("--decline", help="reject the plan, or withdraw an earlier approval")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="approve without asking")] = False,
    by: Annotated[str, option("NAME", "name of the person who decides (default: this account's name)")] = "",
) -> None:
    """Approve or decline a plan at a hospital, or list the submitted plans.

    With 'approval: required' in medsilo.yaml, a plan and its job's code run only after this hospital has approved them.
    The kit's key signs each decision, and only the last decision about a plan counts. Without PLAN, the command lists
    all submitted plans and all decisions.

    With PLAN, the command shows the plan, what would leave this hospital, and every file of the job's code. Then it
    asks whether to approve; scripts without a terminal must add --yes. --decline rejects a plan or withdraws its
    approval: this hospital then sends no further answer, but answers that it has already sent can't be recalled.
    """
    options.check_changes(changes, hash)
    from medsilo.site.approvals import ApprovalLimits

    if hash is not None:
        limits = ApprovalLimits.lasting(expires, rounds, sites)
        if decline and limits.words():
            raise MedsiloError("limits are only for approved plans; omit --decline or the limits")
        _decide(screen, "declined" if decline else "approved", kit, hash, by, limits, changes, yes)
    elif decline:
        raise MedsiloError("no plan was given; give a job or the beginning of a plan's hash")
    else:
        _list(screen, kit)


def _list(screen: Console, kit: Path) -> None:
    from medsilo.check.hospital_checks import KitAtHome
    from medsilo.site.accepted_settings import moment
    from medsilo.site.approvals import study_in_words

    home = KitAtHome.read(kit)
    decided, asked = home.approvals.decisions(), home.approvals.asked()
    last = {one.plan: one for one in decided}
    screen.say(f"approval: {home.settings.approval_of()}" + ("" if decided or asked else "; no plan has asked yet"))
    for one in asked:
        verdict = "waits for a decision" if one.waits(last.get(one.hash)) else last[one.hash].verdict
        parts = [str(one.plan.get(key, {}).get("name", "")) for key in ("algorithm", "task")]
        names = "a canary on synthetic data" if one.is_canary else ", ".join(parts)
        by = f", submitted by {one.lead}" if one.lead else ""
        code = f", with code {one.job_code[:12]}" if one.job_code else ""
        screen.say(f"{one.hash[:12]}  {verdict}: {names}, study {one.study or '–'}{by}{code}, asked {moment(one.at)}")
        if one.hash not in last:
            screen.say(*(f"{INDENT}{name}: {words}" for name, words in study_in_words(one.plan.get("study", {}))))
    screen.say(*map(_line, decided))
    screen.answer(
        approval=home.settings.approval_of(),
        asked=[one.model_dump(mode="json", exclude={"plan"}) for one in asked],
        decisions=[one.model_dump(mode="json") for one in decided],
    )


def page(
    screen: Console,
    *,
    kit: Annotated[Path, option("KIT", options.SITES_KIT)],
    port: Annotated[int, option("PORT", "port of the page; 0: any free port", min=0, max=65_535)] = 0,
) -> None:
    """Serve a hospital's web page, on which its staff read plans, decide about them, and watch studies.

    The page is visible on this machine only, and its address can be opened only once. Ctrl-C stops the page; studies
    continue.
    """
    screen.in_lines = True
    if SITE_PAGE not in PAGES:
        raise MedsiloError("the package medsilo_page is not installed; use 'medsilo approve' to decide about plans")
    try:
        server = PAGES[SITE_PAGE](kit, port)
    except OSError as error:
        raise MedsiloError(f"port {port} of this machine can't be used; give another --port, or omit --port") from error
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

    from medsilo.check.hospital_checks import KitAtHome

    home = KitAtHome.read(kit)
    meant, asked, job_code = _meant(home, given, changes)
    if asked and verdict == "approved":  # an unreadable plan can be declined, but not approved
        from medsilo.check.approval import never_runs, plan_in_words
        from medsilo.check.disclosure import left_in_short
        from medsilo.check.own_data_set import data_set_words
        from medsilo.check.plan_words import words_table

        plan = home.plan_of(asked)
        if plan.task.scripted and job_code is None:
            raise MedsiloError(
                "this plan needs a training script, which this hospital has not stored; give the job's folder instead "
                "of the hash"
            )
        if why := never_runs(home, plan, limits, asked.sites):
            raise MedsiloError(f"this plan could never run here: {why}; the plan is not approved")
        about = [*plan_in_words(plan), *([] if plan.task.synthetic else data_set_words(home.settings, home.files))]
        screen.say(*(f"{name}: {words}" for name, words in about), "What leaves this hospital:")
        screen.say(*(f"{INDENT}{line}" for line in left_in_short(plan, job_code is not None)))
        screen.say(*words_table(plan).as_text(), *_changes(home, asked, plan))
        if job_code:
            _show_code(screen, home, asked, plan.study.title, job_code)
    if verdict == "approved" and not yes:
        _ask(screen, meant, asked is not None, job_code)
    if asked and given.strip(HEXADECIMAL):
        # store a plan from a folder, because nobody may have submitted it yet
        home.approvals.keep(asked, job_code)
    before = home.approvals.last(meant)
    if verdict == "declined" and before and before.verdict == "approved":
        verdict = "withdrawn"
    approves = verdict == "approved"
    code = home.code_of(asked) if approves else {}
    decision = home.approvals.decide(
        meant, verdict, by or getpass.getuser(), limits, code, job_code if approves else None
    )
    screen.say(_line(decision))
    if verdict == "approved" and home.settings.approval_of() == "none":
        screen.warn("medsilo.yaml has no 'approval: required', so plans without an approval run here, too")
    screen.answer(**decision.model_dump(mode="json"))


def _changes(home: "KitAtHome", pending: "AskingPlan", plan: "Plan") -> Iterator[str]:
    """Yield the differences of a plan from the last approved plan of the same study, if there is one."""
    from medsilo.check.approval import approved_before, changes_since
    from medsilo.site.accepted_settings import moment

    if before := approved_before(home, pending, plan):
        decision, earlier = before
        yield f"Changed since plan {decision.plan[:12]} of this study, approved {moment(decision.at)}:"
        lines = [f"{INDENT}{one.key}: {one.words}" for one in changes_since(earlier, plan)]
        yield from lines or [f"{INDENT}nothing"]


def _show_code(screen: Console, home: "KitAtHome", pending: "AskingPlan", title: str | None, code: "JobCode") -> None:
    from medsilo.check.code_review import code_words, review

    before = home.approvals.code_approved(pending, title or "")
    screen.say("The job's code:", *(f"{name}: {words}" for name, words in code_words(code, home.settings, before)))
    for one in review(code, before[1] if before else None):
        screen.say(one.head, *(f"{QUOTED}{line}" for line in one.lines))


def _ask(screen: Console, plan: str, was_shown: bool, code: "JobCode | None") -> None:
    """Ask at the terminal whether to approve a plan, and raise a MedsiloError unless the user answers yes."""
    if not (screen.watched and sys.stdin.isatty()):
        raise MedsiloError(
            "the plan is not approved: the command cannot ask without a terminal; read the plan, then add --yes"
        )
    what = f"plan {plan[:12]}" if was_shown else f"plan {plan[:12]}, which is not here to read"
    what += f" with code {code.hash[:12]}" if code else ""
    if not typer.confirm(f"Approve {what}?"):
        raise MedsiloError(
            "the plan is not approved, because you did not confirm it; to reject the plan, add --decline"
        )


def _meant(home: "KitAtHome", word: str, changes: Sequence[str]) -> "tuple[str, AskingPlan | None, JobCode | None]":
    """Return the hash of the plan that the user named, and, if they are known here, the plan and its code."""
    import time

    from medsilo.flare.job_source import find_job
    from medsilo.flare.jobs import app_at, code_of, plan_of
    from medsilo.site.approvals import AskingPlan
    from medsilo.site.job_code import PLAN

    if word.strip(HEXADECIMAL):
        app = app_at(word, home.kit.name)
        job = app / PLAN if app else find_job(word)
        plan = plan_of(job, changes, allowed=home.settings.packages)
        code = code_of(job, plan, app)
        told = plan.resolved()
        asked = AskingPlan(plan=told, hash=plan.hash, at=int(time.time()), job_code=code.hash if code else "")
        return asked.hash, asked, code
    if changes:
        raise MedsiloError("--set cannot change a plan that is given by its hash; give the job's folder, or omit --set")
    meant, found = word.lower(), home.approvals.asked(word.lower())
    if len(meant) == 64 and not found:  # a full hash needs no submitted plan
        return meant, None, None
    if len(meant) < 8 or len(found) != 1:
        raise MedsiloError(
            f"{counted(len(found), 'submitted plan')} have a hash that begins with {plain(word, 70)}; give at least 8 "
            "digits, all 64 digits, or the job"
        )
    return found[0].hash, found[0], home.approvals.code_of(found[0])


def _line(decision: "Decision") -> str:
    from medsilo.site.accepted_settings import moment

    limits = "".join(f", {words}" for words in decision.limits.words())
    code = f" with code {decision.job_code.hash[:12]}" if decision.job_code else ""
    return f"{decision.plan}  {decision.verdict}{code} by {decision.by}, {moment(decision.at)}{limits}"


def disclosure(
    screen: Console,
    job: options.Job,
    *,
    plan: options.PlanFile = None,
    changes: options.Changes,
    kit: options.SiteKit = None,
    local: options.SettingsFolder = None,
    site: Annotated[
        str | None,
        option("SITE", "the hospital whose settings apply, if the settings folder has settings of several hospitals"),
    ] = None,
) -> None:
    """Print the disclosure report of a job before it runs, or of a finished run.

    The disclosure report lists everything that a site sends: each group of tensors with its bytes, and each number.
    'medsilo docs trust/privacy' explains what medsilo promises about privacy.
    """
    options.check_changes(changes, job, plan)
    folder = options.folder_of_settings(local, kit)
    screen.note("reading the plan")
    import dataclasses

    from medsilo.check.disclosure import describe, leaks
    from medsilo.check.hospital_checks import KitAtHome
    from medsilo.check.script_report import most_that_leaves
    from medsilo.flare.job_source import job_or_run
    from medsilo.flare.jobs import app_at, has_code, plan_of, scope_of
    from medsilo.registry import ANY
    from medsilo.site.job_code import PLAN
    from medsilo.site.policy import Policy
    from medsilo.site.settings import SiteSettings

    app = app_at(job, site or "")
    found = app / PLAN if app else job_or_run(job)
    own = options.folder_of_site(folder, site) if site else folder
    settings = SiteSettings.read(own) if own else SiteSettings(packages=ANY)
    study = plan_of(found, changes, plan, settings.packages)
    named = study.participation.everyone
    if site and named and site not in named:
        raise MedsiloError(f"--site {site!r}: the plan names only {', '.join(named)}")
    is_job = found.is_dir()
    policy = Policy.read(folder, scope_of(found) if is_job else None) if folder else Policy()
    signs = KitAtHome.read(kit).files if kit and settings.data and settings.data.data_set else None
    lines = describe(study, settings, policy, has_code(found), signs)
    screen.say(*lines)
    groups = [{**dataclasses.asdict(leak), "leaves": policy.lets_out(leak.group)} for leak in leaks(study)]
    script = {"script": most_that_leaves(study)} if study.task.scripted else {}
    screen.answer(plan=study.hash, groups=groups, **script, lines=lines)


def list_(
    screen: Console,
    method: Annotated[
        str | None,
        typer.Argument(metavar="METHOD", help="the method to explain", autocompletion=completion.methods),
    ] = None,
) -> None:
    """List the tasks and the methods; for each method, show when to try it, and which tensors leave a hospital.

    A plan names its method under the key algorithm.name, and its task under task.name. With METHOD, the command
    explains this method: its idea, when to try it, its keys, and its cost.
    """
    if method:
        screen.note("loading the method")
        _show_method(screen, method)
        return
    from medsilo.registry import METHODS, TASKS

    methods = [
        {
            "name": name,
            "title": texts["title"],
            "when": _plain(texts.get("suits", "")),
            "leaves": texts.get("sends", "").partition(";")[0],
        }
        for name, texts in ((name, _texts_of(METHODS, name)) for name in METHODS)
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
    tasks = [{"name": name, "title": _texts_of(TASKS, name)["title"]} for name in TASKS]
    screen.say("tasks, as task.name of a plan")
    screen.say(*("{name:<19} {title}".format(**task) for task in tasks))
    screen.answer(methods=methods, tasks=tasks)


def _texts_of(table: "Registry", name: str) -> dict[str, str]:
    """Read the texts of a method or task, such as its title, from the source code of its class, without importing the
    module.
    """
    if package := table.package_of(name):
        return {"title": f"of package {package}"}
    module, _, kind = table.place_of(name).partition(":")
    spec = find_spec(module)
    tree = ast.parse(Path(spec.origin).read_text("utf-8") if spec and spec.origin else "")
    body = next((node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind), [])
    found = {"title": name}
    for node in (node for node in body if isinstance(node, ast.Assign | ast.AnnAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant):
            found[target.id] = str(node.value.value)
    return found


def _show_method(screen: Console, name: str) -> None:
    import inspect
    from difflib import get_close_matches

    from medsilo.check.disclosure import leaving
    from medsilo.registry import METHODS

    if name not in METHODS:
        near = get_close_matches(name.lower(), list(METHODS), 1)
        hint = f"did you mean {near[0]}?" if near else "'medsilo list' has all of them"
        raise MedsiloError(f"{name!r} is not a method; {hint}")
    own = METHODS[name]
    keys = {
        f"algorithm.{key}": {"default": _default_of(field.default), "meaning": _plain(_meaning_of(own, key))}
        for key, field in own.model_fields.items()
        if key != "name"
    }
    facts = {"leaves": leaving(own())}
    if "suits" in vars(own):
        cost = {"bytes": f"{own.bytes_sent} (FedAvg: 1)", "work": own.extra_work}
        facts = {"when": own.suits, **facts, "stays": own.stays, **cost}
    facts = {what: _plain(fact) for what, fact in facts.items()}
    idea = inspect.cleandoc(own.__doc__ or "")
    screen.say(f"{own.title}, {own.paper}", "", idea, "")
    screen.say(*(f"{SAID[what]}: {told}" for what, told in facts.items()))
    screen.say(*(["", "keys"] if keys else []))
    screen.say(*(f"  {key} ({one['default']}): {one['meaning']}" for key, one in keys.items()))
    screen.answer(name=name, title=own.title, paper=own.paper, idea=idea, keys=keys, **facts)


def _plain(text: str) -> str:
    return LINK.sub(r"\1", REFERENCE.sub("", text))


def _default_of(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _meaning_of(kind: Any, key: str) -> str:
    """Return the description of a key from the nearest class that describes the key."""
    fields = (getattr(base, "model_fields", {}).get(key) for base in kind.__mro__)
    return next((field.description for field in fields if field and field.description), "")
