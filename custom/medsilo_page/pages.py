"""The web pages of a hospital: plans that wait for approval, decisions about plans, and running studies."""

import getpass
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from medsilo.check.approval import never_runs, plan_in_words
from medsilo.check.code_review import code_words, review
from medsilo.check.demands import price_list, privacy_findings
from medsilo.check.disclosure import describe
from medsilo.check.hospital_checks import KitAtHome
from medsilo.check.machine import without_walls
from medsilo.check.own_data_set import data_set_words
from medsilo.check.site_check import Visit, check
from medsilo.check.spending import answered, spending_lines, spent
from medsilo.core.errors import MedsiloError
from medsilo.core.text import plain
from medsilo.plan import Plan
from medsilo.runs.disclosed import CASES
from medsilo.site.approvals import NOTHING, ApprovalLimits, AskingPlan, study_in_words
from medsilo.site.job_code import JobCode
from medsilo.site.ledger import ledgers
from medsilo.site.policy import Policy
from medsilo.site.query_budget import PARTS
from medsilo_page.asking import ShownRequest, read_all
from medsilo_page.charts import Series, line_chart
from medsilo_page.local_pages import LocalPages
from medsilo_page.page_server import PageServer
from medsilo_page.watching import Row, StudyMoment, studies

DRAWN = 400
# number of waiting plans that are shown in full; of further plans, only title, purpose and lead are shown
SHOWN_REQUESTS = 3
# maximum number of rows in the table of rounds, and maximum number of lines in the log
SHOWN_ROWS, SHOWN_LINES = 200, 30
COLUMNS = ("round", "validation", "train_loss", "validation_loss", "seconds")
CHECK = "check"
VERBS = {"approve": "approved", "decline": "declined", "withdraw": "withdrawn"}


def serve(kit: Path, port: int) -> PageServer:
    """Return the server of a hospital's web page; the server's attribute `gate.start` is the one-time start address."""
    return PageServer(SitePages(kit).site(), port)


@dataclass
class _Work:
    """A check whether a plan can run at this hospital; a person starts the check on the page."""

    done: Any = None
    failed: str = ""

    @property
    def goes_on(self) -> bool:
        return self.done is None and not self.failed


class SitePages(LocalPages):
    """Answers those requests to the hospital's web page that the server has admitted. Each request reads the hospital's
    files again, so that pages are always up to date.
    """

    def __init__(self, kit: Path) -> None:
        super().__init__()
        self._kit = kit
        self._home()  # an unreadable kit raises an error when the server starts
        self._works: dict[str, _Work] = {}
        self._working = threading.Lock()

    def site(self) -> Starlette:
        routes = [
            Route("/", self._overview),
            Route("/plan/{hash}", self._plan),
            Route("/plan/{hash}/{verb}", self._decide, methods=["POST"]),
            Route("/study/{name}", self._study),
            *self.files(),
        ]
        return Starlette(routes=routes, exception_handlers={MedsiloError: self._failed, HTTPException: self._missing})

    # ------------------------------------------------------------------ pages
    def _overview(self, request: Request) -> Response:
        home = self._home()
        decisions = home.approvals.decisions()
        last = {decision.plan: decision for decision in decisions}
        asked = home.approvals.asked()
        waiting = [one for one in asked if one.waits(last.get(one.hash))]
        return self.page(
            "overview.html",
            request,
            f"Requests and studies of {home.kit.name}",
            **_of_hospital(home),
            waiting=list(read_all(home, waiting[:SHOWN_REQUESTS])),
            others=[(one, study_in_words(one.plan.get("study") or {})) for one in waiting[SHOWN_REQUESTS:]],
            **self._deciding(home),
            titles={one.hash: _title(one) for one in asked},
            decisions=list(reversed(decisions)),
            studies=[(one, _sentence(one)) for one in studies(home.output, home.kit.name)],
            answers=_answer_rows(home),
            names=CASES,
            allowed={part: home.settings.most_answers(part) for part in PARTS},
            ledger=_ledger_lines(home),
        )

    def _plan(self, request: Request) -> Response:
        home, hash = self._home(), request.path_params["hash"]
        asked = self._asked(home, hash)
        if asked is None:
            return self._missing(request)
        one = ShownRequest.read(home, asked)
        plan = one.plan
        code = home.approvals.code_of(asked)
        code_before = home.approvals.code_approved(asked, plan.study.title or "") if code else None
        return self.page(
            "plan.html",
            request,
            one.title,
            one=one,
            asked=asked,
            words=plan_in_words(plan),
            plan_text=plan.to_yaml(),
            code_words=code_words(code, home.settings, code_before) if code else [],
            code_files=review(code, code_before[1] if code_before else None) if code else [],
            report=describe(plan, home.settings, Policy.read(home.local), code is not None, home.files),
            prices=price_list(plan, home.settings) if plan.privacy or home.settings.privacy else [],
            costs=list(privacy_findings(plan, home.settings, home.budget, home.files)),
            ledger=_ledger_lines(home),
            now=time.time_ns(),
            **_of_hospital(home, plan.task.synthetic),
            **self._deciding(home),
        )

    def _deciding(self, home: KitAtHome) -> dict[str, Any]:
        return {"site": home.kit.name, "by": getpass.getuser(), "works": self._works}

    def _study(self, request: Request) -> Response:
        home, name = self._home(), request.path_params["name"]
        watched = StudyMoment.read(home.output, name, home.kit.name)
        if watched is None:
            return self._missing(request)
        last = home.approvals.last(watched.began.plan) if watched.began else None
        asked = self._asked(home, watched.began.plan) if watched.began else None
        synthetic = home.settings.approval is None and asked is not None and home.plan_of(asked).task.synthetic
        hospital = _of_hospital(home, synthetic)
        return self.page(
            "study.html",
            request,
            _title(asked) if asked else f"Study {name}",
            study=name,
            watched=watched,
            sentence=_sentence(watched),
            chart=_chart(watched.rows, watched.began.rounds if watched.began else 0),
            lines=list(reversed(watched.diary[-SHOWN_LINES:])),
            left=watched.seconds_left(),
            quiet=_quiet(watched),
            rows=[[_shown(row.get(name) or "–") for name in COLUMNS] for row in watched.rows[-SHOWN_ROWS:]],
            stops=hospital["required"] and last is not None and last.verdict == "approved",
            **hospital,
            has_plan=asked is not None,
        )

    def _missing(self, request: Request, error: Exception | None = None) -> Response:
        told = "There is no such page, plan or study."
        return self.page("base.html", request, "Not here", HTTPStatus.NOT_FOUND, problem=told)

    def _failed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, MedsiloError)
        told = f"{error} {error.private}".strip()
        return self.page("base.html", request, "That did not work", HTTPStatus.BAD_REQUEST, problem=told)

    # ------------------------------------------------------------------ forms
    def _decide(self, request: Request) -> Response:
        home, hash, verb = self._home(), request.path_params["hash"], request.path_params["verb"]
        asked, base = self._asked(home, hash), request.scope["root_path"]
        if verb == CHECK and asked:
            self._begin(home, home.plan_of(asked), home.approvals.code_of(asked))
            return RedirectResponse(f"{base}/plan/{hash}#{verb}", HTTPStatus.SEE_OTHER)
        if verb not in VERBS or (asked is None and verb != "withdraw"):
            return self._missing(request)
        # the approval is signed for exactly the plan that the page showed to the person
        fields = request.state.fields
        approves = verb == "approve"
        if asked and approves and asked.job_code != fields.get("code", ""):
            raise MedsiloError("the job's code changed after this page was shown; read it again, then decide")
        code, job_code = (home.code_of(asked), asked and home.approvals.code_of(asked)) if approves else (NOTHING, None)
        if asked and approves and job_code is None and home.plan_of(asked).task.scripted:
            raise MedsiloError(
                "this plan trains with a script, and this machine lacks the script's code; approve the job's folder"
            )
        limits = _limits(fields) if approves else None
        if asked and limits and (why := never_runs(home, home.plan_of(asked), limits, asked.sites)):
            raise MedsiloError(f"this plan would never run here: {why}; nothing is approved")
        by = fields.get("by") or getpass.getuser()
        home.approvals.decide(hash, VERBS[verb], by, limits, code, job_code)  # type: ignore[arg-type]
        return RedirectResponse(f"{base}/plan/{hash}" if asked else f"{base}/", HTTPStatus.SEE_OTHER)

    def _begin(self, home: KitAtHome, plan: Plan, code: JobCode | None) -> None:
        """Check in a new thread whether a plan can run at this hospital; the thread first waits until no other check
        runs.
        """
        self._works[plan.hash] = mine = _Work()

        def work() -> None:
            with self._working:
                try:
                    mine.done = check(Visit(home.kit.name, plan, code=code, local=home.local, kit=home.kit))
                except MedsiloError as error:
                    mine.failed = f"{error} {error.private}".strip()
                # The page may show the reason of an error, because only the hospital's own staff see the page.
                except Exception as error:
                    mine.failed = f"{type(error).__name__}: {error}"

        threading.Thread(target=work, daemon=True).start()

    # ------------------------------------------------------------------ the hospital
    def _home(self) -> KitAtHome:
        return KitAtHome.read(self._kit)

    def _asked(self, home: KitAtHome, hash: str) -> AskingPlan | None:
        return next((one for one in home.approvals.asked(hash) if one.hash == hash), None)


def _of_hospital(home: KitAtHome, synthetic: bool = False) -> dict[str, Any]:
    """Return the facts that every page shows: whether plans need an approval, whether scripts lack isolation, and the
    hospital's data set.
    """
    return {
        "required": home.settings.approval_of(synthetic) != "none",
        "unwalled": without_walls(home.settings),
        "data_set": data_set_words(home.settings, home.files),
    }


def _title(pending: AskingPlan) -> str:
    return plain((pending.plan.get("study") or {}).get("title") or pending.study or pending.hash[:12])


def _answer_rows(home: KitAtHome) -> list[dict[str, Any]]:
    """Return the number of this hospital's answers to each study; studies on the present data set come first."""
    own = home.approvals.data
    rows = [{**row, "in_use": row["data"] == own} for row in answered(home.budget)]
    return sorted(rows, key=lambda row: (not row["in_use"], row["data"]))


def _sentence(watched: StudyMoment) -> str:
    if watched.stopped:
        how = "The training process died" if watched.stopped.kind == "died" else "This hospital refused"
        return f"{how}: {watched.stopped.reason}"
    rounds = f"answers to {watched.round} of {watched.began.rounds if watched.began else '?'} rounds have left"
    if watched.ended:
        return f"{watched.ended}; {rounds}."
    if watched.work is None:
        return f"Waiting for the server; {rounds}."
    share = "" if watched.work.share is None else f" {watched.work.share:.0%}"
    what = f"{watched.work.deed}{share} for {watched.work.task} {watched.work.round}"
    return f"{what[0].upper()}{what[1:]}; {rounds}."


def _quiet(watched: StudyMoment) -> float | None:
    """Return the seconds since a running study's last message, rounded down to whole minutes, or None for less than a
    minute.
    """
    silence = (time.time() - watched.last) // 60 * 60
    return silence if not watched.ended and silence else None


def _limits(fields: Mapping[str, str]) -> ApprovalLimits:
    """Return the approval limits that a person has entered in a form. Raise MedsiloError if a value is invalid."""
    hours, rounds = (fields.get(name, "").strip() for name in ("hours", "rounds"))
    for name, text in (("hours", hours), ("rounds", rounds)):
        if text and not (text.isdecimal() and int(text[:9]) > 0 and len(text) < 9):
            raise MedsiloError(f"{name}: give a positive whole number, or leave it empty")
    lasts, most = (int(text) if text else None for text in (hours, rounds))
    return ApprovalLimits.lasting(lasts, most, fields.get("sites", ""))


def _ledger_lines(home: KitAtHome) -> list[str]:
    return [
        line
        for data in ledgers(home.budget.folder)
        for line in spending_lines(spent(home.ledger(data), home.settings.privacy))
    ]


def _shown(text: str) -> str:
    try:
        return f"{float(text):.4g}" if "." in text or "e" in text else text
    except ValueError:
        return "–"


def _chart(rows: tuple[Row, ...], planned: int) -> Any:
    """Draw the validation scores of this site by round. If there are too many rounds for the drawing, only every n-th
    round is drawn.
    """
    places, values = [], []
    for row in rows[:: max(1, -(-len(rows) // DRAWN))]:
        with suppress(KeyError, ValueError):
            value, place = float(row["validation"]), float(row["validated_round"])
            values.append(value)
            places.append(place)
    if not values:
        return None
    return line_chart(
        [Series("this hospital", values, places=places)],
        key="own",
        title="Validation score by round",
        x_label="rounds",
        y_label="validation score",
        last_x=max([planned, *places]),
    )
