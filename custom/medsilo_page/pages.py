"""The pages that a hospital sees: plans that ask, what each would send and cost, decisions, studies as they run."""

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
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from medsilo import __version__
from medsilo.check.approving import difference, plan_in_words, standing
from medsilo.check.at_home import KitAtHome
from medsilo.check.demands import price_list, privacy_findings
from medsilo.check.disclosure import describe
from medsilo.check.spending import spending_lines, spent
from medsilo.check.visit import Visit, check
from medsilo.core.errors import MedsiloError
from medsilo.core.text import counted, duration, size_text
from medsilo.plan import Plan
from medsilo.site.accepted_settings import moment
from medsilo.site.approvals import NOTHING, ApprovalLimits, AskingPlan, Decision
from medsilo.site.ledger import ledgers
from medsilo.site.policy import Policy
from medsilo_lab.report import template
from medsilo_lab.report.charts import Series, line_chart
from medsilo_page.page_server import PageServer
from medsilo_page.watching import Row, StudyMoment, studies

HERE = Path(__file__).parent
DRAWN = 400  # points of a chart at most
SHOWN_ROWS, SHOWN_LINES = 200, 30  # of the table and of the diary: the last ones
COLUMNS = ("round", "validation", "train_loss", "validation_loss", "seconds")  # of the table
CHECK = "check"
VERBS = {"approve": "approved", "decline": "declined", "withdraw": "withdrawn"}


def serve(kit: Path, port: int) -> PageServer:
    """Return a server of a hospital's own page; `gate.start` is the address that opens it once."""
    return PageServer(SitePages(kit).site(), port)


@dataclass
class _Work:
    """A check of this hospital for a plan, begun on a click."""

    done: Any = None
    failed: str = ""

    @property
    def goes_on(self) -> bool:
        return self.done is None and not self.failed


class SitePages:
    """Answers the requests that were let in. Everything shown is read again from the hospital's own files."""

    def __init__(self, kit: Path) -> None:
        self._kit = kit
        self._home()  # a kit that can't be read is said before anybody looks
        self._works: dict[str, _Work] = {}  # by plan
        self._working = threading.Lock()
        self._pages = template.templates_in(HERE)
        self._pages.filters |= {"moment": moment, "size": size_text, "duration": duration}

    def site(self) -> Starlette:
        """Return the pages by their paths."""
        routes = [
            Route("/", self._overview),
            Route("/plan/{hash}", self._plan),
            Route("/plan/{hash}/{verb}", self._decide, methods=["POST"]),
            Route("/study/{name}", self._study),
            Route("/page.css", self._style),
            Route("/page.js", self._script),
        ]
        return Starlette(routes=routes, exception_handlers={MedsiloError: self._failed, HTTPException: self._missing})

    # ------------------------------------------------------------------ pages
    def _overview(self, request: Request) -> Response:
        home = self._home()
        decisions = home.approvals.decisions()
        last = {one.plan: one for one in decisions}
        asked = home.approvals.asked()
        return self._page(
            "overview.html",
            request,
            f"Studies at {home.kit.name}",
            site=home.kit.name,
            required=home.settings.approval != "none",
            waiting=[one for one in asked if one.hash not in last],
            decided=[(one, last[one.hash]) for one in asked if one.hash in last],
            decisions=list(reversed(decisions)),
            studies=[(one, _sentence(one)) for one in studies(home.output, home.kit.name)],
            ledger=_ledger_lines(home),
        )

    def _plan(self, request: Request) -> Response:
        home, hash = self._home(), request.path_params["hash"]
        asked = self._asked(home, hash)
        if asked is None:
            return self._missing(request)
        plan = home.plan_of(asked)
        before = approved_before(home, hash)
        decisions = [one for one in home.approvals.decisions() if one.plan == hash]
        told, runs = standing(home, plan, asked.sites)
        return self._page(
            "plan.html",
            request,
            f"{plan.algorithm.title}, {counted(plan.rounds, 'round')}",
            asked=asked,
            words=plan_in_words(plan),
            plan_text=plan.to_yaml(),
            before=before[0] if before else None,
            changes=difference(plan, before[1]) if before else [],
            leaves=describe(plan, home.settings, Policy.read(home.local)),
            prices=price_list(plan, home.settings) if plan.privacy or home.settings.privacy else [],
            costs=list(privacy_findings(plan, home.settings, home.book, home.files)),
            ledger=_ledger_lines(home),
            check=self._works.get(hash),
            now=time.time_ns(),
            decisions=list(reversed(decisions)),
            standing=f"{told[0].upper()}{told[1:]}: it {'may run' if runs else 'does not run'} here.",
            required=home.settings.approval != "none",
            by=getpass.getuser(),
        )

    def _study(self, request: Request) -> Response:
        home, name = self._home(), request.path_params["name"]
        watched = StudyMoment.read(home.output, name, home.kit.name)
        if watched is None:
            return self._missing(request)
        last = home.approvals.last(watched.began.plan) if watched.began else None
        return self._page(
            "study.html",
            request,
            f"Study {name}",
            watched=watched,
            sentence=_sentence(watched),
            chart=_chart(watched.rows, watched.began.rounds if watched.began else 0),
            lines=list(reversed(watched.diary[-SHOWN_LINES:])),
            left=watched.seconds_left(),
            quiet=_quiet(watched),
            rows=[[_shown(row.get(name) or "–") for name in COLUMNS] for row in watched.rows[-SHOWN_ROWS:]],
            stops=home.settings.approval != "none" and last is not None and last.verdict == "approved",
            required=home.settings.approval != "none",
            has_plan=watched.began is not None and self._asked(home, watched.began.plan) is not None,
        )

    def _missing(self, request: Request, error: Exception | None = None) -> Response:
        told = "There is no such page, plan or study."
        return self._page("problem.html", request, "Not here", HTTPStatus.NOT_FOUND, problem=told)

    def _failed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, MedsiloError)
        told = f"{error} {error.private}".strip()
        return self._page("problem.html", request, "That did not work", HTTPStatus.BAD_REQUEST, problem=told)

    def _style(self, request: Request) -> Response:
        """Return the style of all reports, and that of forms."""
        text = (template.HERE / "style.html").read_text("utf-8").replace("<style>", "").replace("</style>", "")
        return Response(text + (HERE / "page.css").read_text("utf-8"), media_type="text/css")

    def _script(self, request: Request) -> Response:
        return Response((HERE / "page.js").read_text("utf-8"), media_type="text/javascript")

    def _page(
        self, name: str, request: Request, title: str, status: HTTPStatus = HTTPStatus.OK, **content: Any
    ) -> Response:
        about = {"title": title, "version": __version__, "base": f"{request.scope['root_path']}/"}
        text = self._pages.get_template(name).render(**about, word=request.state.word, **content)
        return HTMLResponse(text, status)

    # ------------------------------------------------------------------ what is sent
    def _decide(self, request: Request) -> Response:
        home, hash, verb = self._home(), request.path_params["hash"], request.path_params["verb"]
        asked, base = self._asked(home, hash), request.scope["root_path"]
        if verb == CHECK and asked:
            self._begin(home, home.plan_of(asked))
            return RedirectResponse(f"{base}/plan/{hash}#{verb}", HTTPStatus.SEE_OTHER)
        if verb not in VERBS or (asked is None and verb != "withdraw"):
            return self._missing(request)
        # what was shown is what is signed
        fields = request.state.fields
        code = home.code_of(asked) if verb == "approve" else NOTHING
        limits = _limits(fields) if verb == "approve" else None
        by = fields.get("by") or getpass.getuser()
        home.approvals.decide(hash, VERBS[verb], by, limits, code)  # type: ignore[arg-type]
        return RedirectResponse(f"{base}/plan/{hash}" if asked else f"{base}/", HTTPStatus.SEE_OTHER)

    def _begin(self, home: KitAtHome, plan: Plan) -> None:
        """Check this hospital for a plan in a thread of its own; one at a time."""
        self._works[plan.hash] = mine = _Work()

        def work() -> None:
            with self._working:
                try:
                    mine.done = check(Visit(home.kit.name, plan, local=home.local, kit=home.kit))
                except MedsiloError as error:
                    mine.failed = f"{error} {error.private}".strip()
                except Exception as error:  # shown to whoever asked, at the hospital itself
                    mine.failed = f"{type(error).__name__}: {error}"

        threading.Thread(target=work, daemon=True).start()

    # ------------------------------------------------------------------ the hospital
    def _home(self) -> KitAtHome:
        return KitAtHome.read(self._kit)

    def _asked(self, home: KitAtHome, hash: str) -> AskingPlan | None:
        return next((one for one in home.approvals.asked(hash) if one.hash == hash), None)


def _sentence(watched: StudyMoment) -> str:
    """Return how far a study is, in one line."""
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
    """Return for how many seconds nothing was heard of a study that should go on; whole minutes."""
    silence = (time.time() - watched.last) // 60 * 60
    return silence if not watched.ended and silence else None


def _limits(fields: Mapping[str, str]) -> ApprovalLimits:
    """Return the limits that a form names; raises MedsiloError."""
    hours, rounds = (fields.get(name, "").strip() for name in ("hours", "rounds"))
    for name, text in (("hours", hours), ("rounds", rounds)):
        if text and not (text.isdecimal() and int(text[:9]) > 0 and len(text) < 9):
            raise MedsiloError(f"{name}: give a whole number from 1 on, or nothing")
    lasts, most = (int(text) if text else None for text in (hours, rounds))
    return ApprovalLimits.lasting(lasts, most, fields.get("sites", ""))


def _ledger_lines(home: KitAtHome) -> list[str]:
    return [
        line
        for data in ledgers(home.book.folder)
        for line in spending_lines(spent(home.ledger(data), home.settings.privacy))
    ]


def _shown(text: str) -> str:
    try:
        return f"{float(text):.4g}" if "." in text or "e" in text else text
    except ValueError:
        return "–"


def _chart(rows: tuple[Row, ...], planned: int) -> Any:
    """Draw this site's scores by round; of many rounds some."""
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


def approved_before(home: KitAtHome, plan: str) -> tuple[Decision, Plan] | None:
    """Return the last approval of another plan, and that plan, where it was kept and can still be read."""
    kept = {asked.hash: asked for asked in home.approvals.asked()}
    for decision in reversed(home.approvals.decisions()):
        if decision.verdict == "approved" and decision.plan != plan and decision.plan in kept:
            with suppress(MedsiloError):
                return decision, home.plan_of(kept[decision.plan])
    return None
