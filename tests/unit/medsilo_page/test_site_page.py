"""Test a hospital's web page: the access to the page, the page's content, and the site's obedience to decisions on the
page.
"""

import csv
import html
import http.client
import io
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest
from psutil import CONN_LISTEN, Process

from medsilo.airlock.room import ability
from medsilo.check.approval import approved_before
from medsilo.check.hospital_checks import KitAtHome
from medsilo.cli import main
from medsilo.core.errors import Refused
from medsilo.federation.permission import Permission
from medsilo.federation.site_state import COLUMNS, StatusFile
from medsilo.flare.executor import note
from medsilo.plan import parse_plan
from medsilo.runs import paths
from medsilo.runs.own_files import LogEntry
from medsilo.site.approvals import AskingPlan
from medsilo.site.query_budget import QueryBudget, Requester
from medsilo_page import page_server
from medsilo_page.page_server import COOKIE, HEADERS, HOST, MOST_AT_ONCE, MOST_BODY, Gate, PageServer
from medsilo_page.pages import serve
from medsilo_page.watching import StudyMoment
from tests.browser import Browser, chromium
from tests.conftest import SITES
from tests.hospital import write_table
from tests.secure.consortium import wait_until
from tests.unit.site.test_approvals import A, Home, refused, table_plan

FORM = "application/x-www-form-urlencoded"
Answer = tuple[int, str, http.client.HTTPMessage]
STRANGE = ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example:{port}", ""]


@dataclass
class Visitor:
    """A person whose browser does not follow redirects automatically."""

    gate: Gate
    cookie: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def port(self) -> int:
        return urlsplit(self.gate.start).port or 0

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, fields: dict[str, str], **headers: str) -> Answer:
        given = {"Origin": self.origin, "Content-Type": FORM, **headers}
        return self.ask("POST", path, urlencode(fields), {name: text for name, text in given.items() if text})

    def ask(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> Answer:
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        own = {"Cookie": self.cookie} if self.cookie else {}
        try:
            line.request(method, path, body, {**own, **headers})
            reply, text = line.getresponse(), ""
            with suppress(ConnectionError):  # the server may cut off its answer if it has not read the whole request
                text = reply.read().decode()
            return reply.status, text, reply.headers
        finally:
            line.close()

    def begin(self) -> None:
        split = urlsplit(self.gate.start)
        status, _, headers = self.get(f"{split.path}?{split.query}")
        assert status == 200
        assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=strict" in headers["Set-Cookie"]
        self.cookie = headers["Set-Cookie"].partition(";")[0]

    def page(self, path: str = "/", status: int = 200) -> str:
        got, text, headers = self.get(self.gate.base + path)
        assert got == status, text
        assert headers["Cache-Control"] == "no-store" and "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        return html.unescape(text)

    def send(self, path: str, **fields: str) -> Answer:
        [word] = set(re.findall(r'name="word" value="([^"]+)"', self.page(path.rpartition("/")[0])))
        return self.post(self.gate.base + path, {"word": word, **fields})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("page") / "kit")
    home.permission()._keep()
    plan = home.plan
    told = {"plan": plan.hash, "method": plan.algorithm.title, "rounds": plan.rounds}
    note(home.place, kind="began", **told, lead="lead@clinic.example")
    note(home.place, {"task": "join", "round": 0}, kind="answered", bytes=0)
    note(home.place, {"task": "round", "round": 1}, kind="answered", bytes=0, seconds=2.0, memory=5e8)
    write_rows(home, [1])
    return home


def write_rows(home: Home, rounds: Any, text: str = "0.5") -> None:
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow(COLUMNS)
    writer.writerows((number, "train", 6, "0.25", number - 1, text, "0.7", "2.0") for number in rounds)
    (home.place / paths.METRICS).write_text(written.getvalue())


@contextmanager
def serving(server: PageServer) -> Iterator[Gate]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.gate
    finally:
        server.should_exit = True
        thread.join(60)


@pytest.fixture
def served(home: Home) -> Iterator[Gate]:
    with serving(serve(home.folder, 0)) as gate:
        yield gate


@pytest.fixture
def visitor(served: Gate) -> Visitor:
    visitor = Visitor(served)
    visitor.begin()
    return visitor


def test_each_page_says_that_the_airlock_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In earlier versions, the page on which a person approves scripts did not mention that the machine lacks a sandbox
    for the airlock.
    """
    home = Home(tmp_path / "kit")
    home.permission()._keep()
    with (home.folder / "local" / "medsilo.yaml").open("a") as file:
        file.write("\nairlock: wanted\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    ability.cache_clear()
    try:
        with serving(serve(home.folder, 0)) as gate:
            (visitor := Visitor(gate)).begin()
            shown = [visitor.page(path) for path in ("/", f"/plan/{home.plan.hash}")]
    finally:
        ability.cache_clear()
    assert all("apt install bubblewrap" in page and "No airlock" in page for page in shown)


# ---------------------------------------------------------------------------------------------------------- who gets in
def test_nobody_without_the_token_sees_or_changes_anything(served: Gate, home: Home) -> None:
    """Without a cookie, or with a wrong cookie, a used token or a guessed path, nobody can open or change a page."""
    stranger, path = Visitor(served), f"/plan/{home.plan.hash}"
    for cookie in ("", f"{COOKIE}=x", f"{COOKIE}={served.session[:-1]}", f"other={served.session}", 'a="\\'):
        stranger.cookie = cookie
        for place in ("/", f"{served.base}/", f"{served.base}{path}", f"{served.base}/study/study", "/start"):
            status, text, _ = stranger.get(place)
            assert status == 403 and home.plan.hash not in text
        for verb in ("approve", "decline", "withdraw", "check"):
            assert stranger.post(f"{served.base}{path}/{verb}", {"word": served.word})[0] == 403
    stranger.cookie = f"{COOKIE}={served.session}"
    assert stranger.get("/guess/")[0] == 403
    stranger.cookie = ""
    stranger.begin()
    split = urlsplit(served.start)
    assert Visitor(served).get(f"{split.path}?{split.query}")[0] == 403
    assert not home.approvals.decisions()
    listening = [one.laddr for one in Process().net_connections("tcp") if one.status == CONN_LISTEN]
    assert [place.ip for place in listening if place.port == stranger.port] == [HOST] == ["127.0.0.1"]


def test_the_token_is_good_once_whoever_asks_at_the_same_time(served: Gate) -> None:
    visitors, split = [Visitor(served) for _ in range(16)], urlsplit(served.start)
    start = f"{split.path}?{split.query}"
    assert visitors[0].ask("HEAD", start, None, {})[0] == 501 and visitors[0].post(start, {})[0] == 403
    with ThreadPoolExecutor(len(visitors)) as pool:
        answers = list(pool.map(lambda one: one.get(start), visitors))
    assert sorted(status for status, _, _ in answers) == [200] + [403] * 15
    assert sum("Set-Cookie" in headers for _, _, headers in answers) == 1


def test_another_host_name_is_refused(visitor: Visitor, home: Home) -> None:
    """The test simulates DNS rebinding: another host name resolves to this machine, and the request has the right
    cookie.
    """
    port, path = visitor.port, f"{visitor.gate.base}/"
    for host in STRANGE:
        status, text, _ = visitor.get(path, Host=host.format(port=port))
        assert status == 421 and home.plan.hash not in text
    assert visitor.get(path, Host=f"localhost:{port}")[0] == 200


def test_what_another_page_sends_is_refused(visitor: Visitor, home: Home) -> None:
    """The page rejects forms from another site, from another port, from a sandboxed page, and without the session's
    secret word.
    """
    path, word = f"{visitor.gate.base}/plan/{home.plan.hash}/approve", {"word": visitor.gate.word}
    for origin in (
        "https://evil.example",
        "null",
        "http://127.0.0.1:1",
        f"https://127.0.0.1:{visitor.port}",
    ):
        assert visitor.post(path, word, Origin=origin)[0] == 403
    assert visitor.post(path, word, Origin="", Referer="https://evil.example/")[0] == 403
    assert visitor.post(path, word, Origin="")[0] == 403
    assert visitor.post(path, word, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    for wrong in ({}, {"word": ""}, {"word": "x"}, {"word": visitor.gate.word[:-1]}):
        assert visitor.post(path, wrong)[0] == 403
    assert visitor.get(f"{path}?{urlencode(word)}")[0] == 404  # a GET request must change nothing
    assert not home.approvals.decisions()


def test_large_slow_and_odd_requests(visitor: Visitor, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    served = visitor.gate
    path = f"{served.base}/plan/{home.plan.hash}/approve"
    assert visitor.post(path, {"word": served.word, "by": "x" * MOST_BODY})[0] == 413
    assert visitor.post(path, {"word": served.word}, **{"Content-Length": "9" * 9})[0] == 413
    for length in ("9" * 30, "-1", "x", "1, 2"):
        assert visitor.post(path, {"word": served.word}, **{"Content-Length": length})[0] == 400
    form, told = urlencode({"word": served.word}), {"Origin": visitor.origin, "Content-Type": FORM}
    chunks = f"{len(form):x}\r\n{form}\r\n0\r\n\r\n"
    for length in ({}, {"Content-Length": str(len(form))}):
        assert visitor.ask("POST", path, chunks, {**told, "Transfer-Encoding": "chunked", **length})[0] == 411
    assert visitor.post(path, {"word": served.word}, **{"Content-Type": "text/plain"})[0] == 415
    assert visitor.post(path, {f"field-{n}": "" for n in range(200)})[0] == 400
    assert visitor.ask("DELETE", path, None, {})[0] == 501
    for odd in ("/plan/x", "/plan/../..", "/study/..%2f..", "/study/_hospital", "/study/none", "/plan", "/x"):
        assert visitor.get(served.base + odd)[0] == 404
    assert not home.approvals.decisions()


def test_a_slow_sender_is_cut_off(visitor: Visitor, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """One client never ends its headers, and a second client sends its body byte by byte at long intervals."""
    gate = visitor.gate
    head = f"POST {gate.base}/plan/{home.plan.hash}/approve HTTP/1.1\r\nHost: 127.0.0.1:{visitor.port}\r\n"
    head += f"Cookie: {visitor.cookie}\r\nOrigin: {visitor.origin}\r\nContent-Length: 100\r\n"
    head += f"Content-Type: {FORM}\r\n"
    monkeypatch.setattr(page_server, "PATIENCE", 0.3)
    for begin in (head, f"{head}\r\n"):
        with socket.create_connection(("127.0.0.1", visitor.port), timeout=60) as slow:
            slow.sendall(begin.encode())
            slow.settimeout(0.2)
            sent, told = 0, None
            while told is None and sent < 90:
                with suppress(TimeoutError, ConnectionError):
                    told = slow.recv(100)
                with suppress(ConnectionError):
                    slow.sendall(b"x")
                sent += 1
            assert told == b""
    monkeypatch.undo()
    assert visitor.page("/")
    assert not home.approvals.decisions()


def test_silent_connections_do_not_close_the_page(visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """If too many connections are open at once, the page closes silent connections after some time."""
    with ExitStack() as idle:
        address = ("127.0.0.1", visitor.port)

        def silent(many: int) -> list[socket.socket]:
            return [idle.enter_context(socket.create_connection(address, timeout=60)) for _ in range(many)]

        monkeypatch.setattr(page_server, "PATIENCE", 600.0)
        silent(MOST_AT_ONCE + 8)
        assert visitor.page("/")
        monkeypatch.setattr(page_server, "PATIENCE", 1.0)
        for line in silent(8):
            with suppress(ConnectionError):
                assert line.recv(10) == b""


def test_names_from_elsewhere_are_shown_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A lead's and a hospital's name contain a character that reverses the order of the following letters."""
    home, odd = Home(tmp_path / "kit"), "lead\u202egro.cinilc@"
    place = replace(home.permission().context, lead=odd, sites=(odd,))
    Permission(place)._keep()
    assert main(["approve", "--kit", str(home.folder)]) == 0
    shown = capsys.readouterr().out
    assert "lead gro.cinilc@" in shown and "\u202e" not in shown
    with serving(serve(home.folder, 0)) as gate:
        visitor = Visitor(gate)
        visitor.begin()
        for path in ("/", f"/plan/{home.plan.hash}"):
            shown = visitor.page(path)
            assert "lead gro.cinilc@" in shown and "\u202e" not in shown


def test_every_answer_has_the_headers_and_nothing_is_logged(
    visitor: Visitor, home: Home, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    base, plan, host = visitor.gate.base, f"/plan/{home.plan.hash}", f"Host: 127.0.0.1:{visitor.port}\r\n"
    answers = [
        (200, visitor.get(f"{base}/")),
        (200, visitor.get(f"{base}/page.js")),
        (303, visitor.send(f"{plan}/check")),
        (403, Visitor(visitor.gate).get("/start?token=x")),
        (404, visitor.get(f"{base}/x")),
        (411, visitor.post(f"{base}{plan}/approve", {}, **{"Transfer-Encoding": "chunked"})),
        (421, visitor.get(f"{base}/", Host="evil.example")),
        (501, visitor.ask("DELETE", f"{base}/", None, {})),
    ]
    for what in ("nothing of HTTP\r\n\r\n", f"GET / HTTP/1.1\r\n{host}{host}\r\n", "GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", visitor.port), timeout=60) as line:
            line.sendall(what.encode())
            reply = http.client.HTTPResponse(line)
            reply.begin()
            answers.append((400, (reply.status, reply.read().decode(), reply.headers)))
    answers.append((200, visitor.get(f"{base}/", Upgrade="websocket", Connection="upgrade")))

    async def broken(scope: object, receive: object, send: object) -> None:
        raise ValueError("secret")

    with serving(PageServer(broken)) as gate:
        other = Visitor(gate)
        other.begin()
        answers.append((500, other.get(f"{gate.base}/")))
    for wanted, (status, text, headers) in answers:
        assert status == wanted and "secret" not in text
        assert {name: set(headers.get_all(name, [])) for name in HEADERS} == {name: {HEADERS[name]} for name in HEADERS}
    assert capfd.readouterr() == ("", "") and not caplog.records


# ------------------------------------------------------------------------------------------------- contents of the page
def test_reading_a_plan_and_deciding(visitor: Visitor, home: Home) -> None:
    """A person reads a plan and its disclosures, approves with limits, withdraws or declines, and the site obeys."""
    shown = visitor.page("/")
    assert f"plan <code>{home.plan.hash[:12]}</code>" in shown and "submitted by lead@clinic.example" in shown
    plan = f"/plan/{home.plan.hash}"
    shown = visitor.page(plan)
    for words in (
        "4; passes over",
        "What leaves a site under FedAvg",
        "Bytes in all",
        "Nobody has decided",
        home.plan.hash,
    ):
        assert words in shown
    assert "<script" not in shown and "Run the check" in shown
    status, _, headers = visitor.send(f"{plan}/approve", by="Dr. A <b>", rounds="2", hours="5", sites="")
    assert (status, headers["Location"]) == (303, visitor.gate.base + plan)
    permission = home.permission()
    permission.check(number=2)
    with pytest.raises(Refused, match="at most 2 rounds"):
        permission.check(number=3)
    _, raw, _ = visitor.get(visitor.gate.base + plan)
    # the page escapes the name, so that browsers do not read the name as HTML
    assert "Dr. A &lt;b&gt;" in raw and "at most 2 rounds" in raw
    assert visitor.send(f"{plan}/withdraw")[0] == 303
    refused(home, "has withdrawn")
    assert visitor.send(f"{plan}/decline")[0] == 303
    refused(home, "has declined")
    status, text, _ = visitor.send(f"{plan}/withdraw")
    assert status == 400 and "nothing to withdraw" in text
    assert visitor.send(f"{plan}/approve", rounds="many")[0] == 400
    assert visitor.send(f"{plan}/steal")[0] == 404
    assert [one.verdict for one in home.approvals.decisions()] == ["approved", "withdrawn", "declined"]
    other = "0" * 64
    assert visitor.post(f"{visitor.gate.base}/plan/{other}/approve", {"word": visitor.gate.word})[0] == 404


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("desk")
    home = Home(folder / "kit")
    rows = [{"patient": f"p{n}", "age": 30 + n % 60, "stage": "I" * (1 + n % 2)} for n in range(80)]
    write_table(folder / "data/registry.csv", [{**row, "relapse": ("no", "yes")[n % 2]} for n, row in enumerate(rows)])
    kit = ["--kit", str(home.folder)]
    assert (
        main(
            [
                "data",
                str(folder / "data"),
                "-o",
                str(folder / "set"),
                "--yes",
                "--set",
                "target=relapse",
                "--set",
                "telling=stage",
            ]
        )
        == 0
    )
    (home.folder / "local/medsilo.yaml").write_text(f"device: cpu\napproval: required\ndata: {folder / 'set'}\n")
    assert main(["data", "accept", str(folder / "set"), "--by", "A. Person", *kit]) == 0
    first, second = (table_plan(high, "find relapses early", **{"training.rounds": high}) for high in (90, 95))
    other = second.with_changes(["study.title=Another study", "training.rounds=7"])
    canary = home.plan.with_changes(["layers=[{name: canary}]"])
    home.approvals = KitAtHome.read(home.folder).approvals
    for number, plan in enumerate((first, other, canary, second)):
        asked = {"hash": plan.hash, "study": f"s-{number}", "lead": "lead@clinic.example", "sites": tuple(SITES)}
        home.approvals.keep(AskingPlan(plan=plan.resolved(), at=int(time.time()) - 60 + number, **asked))
        if plan is not second:
            home.approvals.decide(plan.hash, "approved", "engineer", None, plan.code)
    home.plan, budget = second, QueryBudget(home.folder / "medsilo/_hospital" / A)
    asker = Requester("lead@clinic.example", home.approvals.data, "s-0")
    budget.note(asker, {"validation": 3, "test": 1}, KitAtHome.read(home.folder).settings)
    told = {"plan": first.hash, "method": first.algorithm.title, "rounds": first.rounds}
    note(home.place, kind="began", **told, lead="lead@clinic.example")
    note(home.place, {"task": "round", "round": 1}, kind="answered", bytes=51_200, seconds=2.0, memory=5e8)
    write_rows(home, [1])
    return home


def test_a_request_says_what_changed_since_the_last_plan_of_its_study(desk: Home) -> None:
    """In earlier versions, the page compared a plan with another study's plan, and printed Python's notation."""
    with serving(serve(desk.folder, 0)) as gate:
        visitor = Visitor(gate)
        visitor.begin()
        shown = visitor.page(f"/plan/{desk.plan.hash}")
        changes = re.findall(r"<li>(.*?): <strong>(.*?)</strong> <small><code>(.*?)</code>", shown)
        assert changes == [
            ("Columns that are inputs of the network", "age: high 95.0, before 90.0", "task.columns"),
            ("Rounds of the study", "95, before 90", "training.rounds"),
        ]
        assert "2 keys changed" in visitor.page()
    other = next(one for one in desk.approvals.asked() if one.study == "s-1")
    assert approved_before(KitAtHome.read(desk.folder), other, parse_plan(other.plan)) is None


def test_the_terminal_says_what_changed_too(desk: Home, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["approve", desk.plan.hash[:12], "--kit", str(desk.folder)]) == 1
    said = capsys.readouterr().out
    assert "training.rounds: 95, before 90" in said and "task.columns: age: high 95.0, before 90.0" in said


def test_a_plan_with_words_that_nobody_accepted_is_not_approved_on_the_page_either(desk: Home) -> None:
    plan = desk.plan.with_changes(["task.columns=[{name: age, low: 30, high: 95}, {name: hiv, levels: [one, two]}]"])
    asked = {"hash": plan.hash, "study": "s-9", "lead": "lead@clinic.example", "sites": tuple(SITES)}
    desk.approvals.keep(AskingPlan(plan=plan.resolved(), at=int(time.time()), **asked))
    with serving(serve(desk.folder, 0)) as gate:
        visitor = Visitor(gate)
        visitor.begin()
        _, text, _ = visitor.post(f"{gate.base}/plan/{plan.hash}/approve", {"word": gate.word, "by": "A. Person"})
    assert "would never run here" in text and "hiv" in text
    assert desk.approvals.last(plan.hash) is None
    desk.approvals.decide(plan.hash, "declined", "engineer", None, plan.code)


def test_the_desk_shows_what_studies_sent_and_the_account_of_answers(desk: Home) -> None:
    with serving(serve(desk.folder, 0)) as gate:
        visitor = Visitor(gate)
        visitor.begin()
        shown = visitor.page()
        cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", shown)
        place = cells.index("s-0")
        assert cells[place : place + 7] == ["s-0", "lead@clinic.example", "in use", "0", "3", "1", "–"]
        assert "51.2 kB" in cells and "FedAvg, lead@clinic.example" in cells
        assert "97 of 1,997 over validation cases, 1 of 99 over test cases, which this lead has left" in shown


def test_a_request_that_cannot_be_read_hides_no_other(desk: Home) -> None:
    broken = AskingPlan(plan={"study": {"title": "Broken"}}, hash="ab" * 32, at=int(time.time()))
    desk.approvals.keep(broken)
    with serving(serve(desk.folder, 0)) as gate:
        visitor = Visitor(gate)
        visitor.begin()
        shown = visitor.page()
        assert shown.index("Broken") < shown.index("The plan can't be read:") < shown.index("find relapses early")
        assert shown.count(">Decline</button>") == 1
    (desk.approvals.folder / "asked" / f"{broken.hash}.json").unlink()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
def test_a_request_is_decided_on_the_first_screen(width: int, scheme: str, desk: Home, tab: Browser) -> None:
    """The first screen shows the title, purpose, disclosures, data set, cost, check and buttons.

    In earlier versions, a person had to scroll 4,300 pixels to the buttons.
    """
    tab.size(width, 900, phone=width == 400)
    tab.media(scheme=scheme)
    with serving(serve(desk.folder, 0)) as gate:
        start = f"{gate.start.partition('/start')[0]}{gate.base}"
        tab.visit(gate.start)
        for place in ("/", "/study/study", f"/plan/{desk.plan.hash}"):
            tab.visit(start + place)
            assert (place, tab.faults()) == (place, [])
            assert tab.ask("document.documentElement.scrollWidth") <= width
            assert tab.complaints == []
            if "study" not in place:
                for button in ("approve", "decline"):
                    assert tab.ask(HIT % button), f"{button} is not on the first screen of {place}"
        for part in ("h1", ".purpose", ".leaks", "dl.terms", ".checking"):
            assert tab.ask(f"document.querySelector('{part}').getBoundingClientRect().bottom") <= 900, part


HIT = """(button => {
  const box = button.getBoundingClientRect();
  return button.contains(document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2));
})(document.querySelector('.buttons [id^=%s]'))"""


@pytest.mark.slow
def test_a_person_decides_with_the_keyboard(desk: Home, tab: Browser) -> None:
    """The person reaches all elements by the Tab key; the person's name in the form signs the decision."""
    tab.size(1400, 900)
    with serving(serve(desk.folder, 0)) as gate:
        tab.visit(gate.start)
        tab.visit(f"{gate.start.partition('/start')[0]}{gate.base}/plan/{desk.plan.hash}")
        met: list[str] = []
        while not met or met[-1] != "decline":
            tab.press("Tab", 9)
            met.append(tab.ask("document.activeElement.id || document.activeElement.tagName"))
            assert len(met) < 30, met
            box = tab.ask("(r => [r.top, r.bottom])(document.activeElement.getBoundingClientRect())")
            assert (box[0] >= 0 and box[1] <= 900) or met[-1] == "A", "the focused element is not visible"
        assert met[-3:] == ["SUMMARY", "approve", "decline"] and met[-4] == "by"
        tab.ask("document.querySelector('#by').value = 'Dr. Key Board'")
        tab.press("Enter", 13, "\r")
        wait_until(lambda: tab.ask("!!document.querySelector('#history-title')"), 60, "the decision")
    decision = KitAtHome.read(desk.folder).approvals.last(desk.plan.hash)
    assert decision and (decision.verdict, decision.by) == ("declined", "Dr. Key Board")


@pytest.mark.slow
def test_the_check_on_a_click(visitor: Visitor, home: Home) -> None:
    plan = f"/plan/{home.plan.hash}"
    assert visitor.send(f"{plan}/check")[0] == 303
    wait_until(lambda: "NO-GO: " in visitor.page(plan), 120, "the check")
    shown = visitor.page(plan)
    assert "stops, network" in shown and "stops, rehearsal" not in shown


def test_a_study_as_it_goes_on(visitor: Visitor, home: Home) -> None:
    shown = visitor.page("/study/study")
    assert "answers to 1 of 4 rounds" in shown and "FedAvg" in shown
    now = StatusFile(home.place, device="cpu")
    with now.answering("round", 2):
        now.begin("training", 8)
        now._tell()
        shown = visitor.page("/study/study")
        assert "Training 0% for round 2; answers to 1 of 4" in shown
        assert "<dd>cpu</dd>" in shown and 'class="chart"' in shown
    reason = "the training process died (SIGKILL): memory ran out"
    note(home.place, {"task": "round", "round": 2}, kind="died", reason=reason)
    assert f"The training process died: {reason}" in visitor.page("/study/study")
    assert f"The training process died: {reason}" in visitor.page("/")
    note(home.place, kind="ended", reason="the job ended here")
    assert f"The training process died: {reason}" in visitor.page("/study/study")
    note(home.place, {"task": "round", "round": 2}, kind="answered")
    note(home.place, kind="died", reason=reason)
    note(home.place, {"task": "round", "round": 3}, kind="answered")
    shown = visitor.page("/study/study")
    assert "Waiting for the server; answers to 3 of 4" in shown
    assert f"<strong>the training process died</strong> between two tasks: {reason}" in shown
    note(home.place, kind="ended", reason="the job ended here")
    shown = visitor.page("/study/study")
    assert "Waiting" not in shown and "ended here before its last task" in shown and "the job ended here" in shown
    write_rows(home, range(1, 401))
    rows = re.findall(r'<tr><th scope="row">(\d+)</th>', visitor.page("/study/study"))
    assert rows == [str(number) for number in range(201, 401)]


def test_the_time_left_of_a_study_grows_shorter_after_an_answer(tmp_path: Path) -> None:
    """With 20 s per round and eight rounds to go, 160 s are left right after an answer, and 100 s one minute later."""
    now = time.time()
    began = LogEntry(at=now - 100, kind="began", rounds=10)
    answers = [LogEntry(at=now - 60 - age, kind="answered", task="round", round=2 - age // 20) for age in (20, 0)]
    folder = paths.site_folder(tmp_path / "study", A)
    folder.mkdir(parents=True)
    (folder / paths.DIARY).write_text("".join(f"{line.model_dump_json()}\n" for line in (began, *answers)))
    study = StudyMoment.read(tmp_path, "study", A)
    assert study and 40 < (study.seconds_left() or 0) <= 100
