"""The hospital's own web server: on this machine's loopback address only, for the person who has the start address.

The start address holds a token that is good for one use, and is exchanged for a cookie. Everything else lies under a
path that nobody can guess, since a browser sends cookies of 127.0.0.1 to every port of it. A request must name this
server as its host, and one that changes something must come from a page of this server, with the session's own word.
"""

import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from medsilo.core.errors import MedsiloError

HOST = "127.0.0.1"
COOKIE = "medsilo"
START = "/start"
WORD = "word"  # the field of a form that only this session's pages know
MOST_BODY = 16_384  # bytes of a form
MOST_FIELDS = 50
MOST_AT_ONCE = 32  # connections
PATIENCE = 15.0  # seconds for a whole request
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
HTML = "text/html; charset=utf-8"


class NotServed(MedsiloError):
    """A request that the page answers with a status alone."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


@dataclass(frozen=True)
class Query:
    """A request that was let in."""

    path: str  # below the session's own
    fields: Mapping[str, str] = field(default_factory=dict)  # of a form that was sent; empty where one only looks
    sends: bool = False  # whether it may change something
    word: str = ""  # for the forms of the answer


@dataclass(frozen=True)
class Reply:
    """An answer to a request."""

    content: str | bytes = ""
    status: HTTPStatus = HTTPStatus.OK
    kind: str = HTML
    goes_to: str = ""  # a path below the session's own, where a browser goes on
    saved_as: str = ""  # the name of a file, which a browser keeps and does not show


Site = Callable[[Query], Reply]


class PageServer(ThreadingHTTPServer):
    """Serves one session of one person."""

    daemon_threads = True
    request_queue_size = MOST_AT_ONCE

    def __init__(self, site: Site, port: int = 0) -> None:
        """site: answers what was let in; port: 0 for any that is free."""
        super().__init__((HOST, port), _Handler)
        self.site = site
        self.base = f"/{secrets.token_urlsafe(24)}"
        self.session, self.word = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._token: str | None = secrets.token_urlsafe(32)
        self.start = f"http://{HOST}:{self.server_port}{START}?token={self._token}"
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self._exchanging = threading.Lock()
        self._free = threading.BoundedSemaphore(MOST_AT_ONCE)

    def exchange(self, token: str) -> bool:
        """Return whether this is the token, which is good no more from now on."""
        with self._exchanging:
            good = self._token is not None and secrets.compare_digest(token.encode(), self._token.encode())
            if good:
                self._token = None
            return good

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread for a connection, unless there are as many as are served at once."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, and give its place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a connection that broke: its address and its headers are nobody's business."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "medsilo", ""

    def setup(self) -> None:
        super().setup()
        self._late = threading.Timer(PATIENCE, self._give_up)  # a slow sender is cut off, whatever it has sent so far
        self._late.daemon = True
        self._late.start()

    def finish(self) -> None:
        self._late.cancel()
        super().finish()

    def _give_up(self) -> None:
        self.close_connection = True
        self.server.shutdown_request(self.request)

    def do_GET(self) -> None:
        """Answer who looks."""
        self._answer(self._looked)

    def do_POST(self) -> None:
        """Answer who sends a form."""
        self._answer(self._sent)

    def _answer(self, made: Callable[[], Reply]) -> None:
        try:
            self._check_host()
            reply = self._exchanged() if urlsplit(self.path).path == START else made()
        except NotServed as error:
            reply = Reply(_refusal(error.status), error.status)
        self._late.cancel()
        self._send(reply)

    # ------------------------------------------------------------------ who may
    def _check_host(self) -> None:
        """Refuse a name that somebody else made point to this machine."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0] not in self.server.hosts:
            raise NotServed(HTTPStatus.MISDIRECTED_REQUEST)

    def _exchanged(self) -> Reply:
        """Give the session's cookie for the token."""
        token = parse_qs(urlsplit(self.path).query).get("token", [""])[0]
        if self.command != "GET" or not self.server.exchange(token):
            raise NotServed(HTTPStatus.FORBIDDEN)
        self._cookie = f"{COOKIE}={self.server.session}; HttpOnly; SameSite=Strict; Path={self.server.base}"
        return Reply(_onward(f"{self.server.base}/"))

    def _path(self) -> str:
        """Return the path below the session's; refuse whoever does not know it, or has no cookie."""
        path = urlsplit(self.path).path
        if not secrets.compare_digest(path[: len(self.server.base)].encode(), self.server.base.encode()):
            raise NotServed(HTTPStatus.FORBIDDEN)
        try:
            given = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError as error:
            raise NotServed(HTTPStatus.FORBIDDEN) from error
        if given is None or not secrets.compare_digest(given.value.encode(), self.server.session.encode()):
            raise NotServed(HTTPStatus.FORBIDDEN)
        return path[len(self.server.base) :]

    def _looked(self) -> Reply:
        return self.server.site(Query(self._path(), word=self.server.word))

    def _sent(self) -> Reply:
        path, origin = self._path(), self.headers.get("Origin")
        own = f"http://{self.headers['Host']}"
        if origin is None:  # some browsers leave it out where a page sends to its own server
            referrer = urlsplit(self.headers.get("Referer", ""))
            origin = f"{referrer.scheme}://{referrer.netloc}"
        if origin != own or self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise NotServed(HTTPStatus.FORBIDDEN)
        fields = self._fields()
        if not secrets.compare_digest(fields.pop(WORD, "").encode(), self.server.word.encode()):
            raise NotServed(HTTPStatus.FORBIDDEN)
        return self.server.site(Query(path, fields, sends=True, word=self.server.word))

    def _fields(self) -> dict[str, str]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or self.headers.get("Transfer-Encoding"):
            raise NotServed(HTTPStatus.LENGTH_REQUIRED)
        if len(length) > 9 or int(length) > MOST_BODY:
            raise NotServed(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if self.headers.get_content_type() != "application/x-www-form-urlencoded":
            raise NotServed(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise NotServed(HTTPStatus.BAD_REQUEST)
        try:
            read = parse_qs(body.decode("utf-8"), keep_blank_values=True, max_num_fields=MOST_FIELDS)
        except ValueError as error:
            raise NotServed(HTTPStatus.BAD_REQUEST) from error
        return {name: values[0] for name, values in read.items() if len(values) == 1}

    # ------------------------------------------------------------------ what is sent
    _cookie = ""

    def _send(self, reply: Reply) -> None:
        body = reply.content.encode() if isinstance(reply.content, str) else reply.content
        self.close_connection = True
        self.send_response(HTTPStatus.SEE_OTHER if reply.goes_to else reply.status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.kind)
        self.send_header("Connection", "close")
        if reply.goes_to:
            self.send_header("Location", f"{self.server.base}{reply.goes_to}")
        if reply.saved_as:
            self.send_header("Content-Disposition", f"attachment; filename*=UTF-8''{quote(reply.saved_as)}")
        if self._cookie:
            self.send_header("Set-Cookie", self._cookie)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):  # the reader has gone
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write no log: its lines would hold the token."""


def _onward(place: str) -> str:
    """Return a page that goes on by itself: what it asks for comes from this server, so the cookie is sent along."""
    refresh = f'<meta http-equiv="refresh" content="0; url={place}">'
    return _plain_page("medsilo", f'<p><a href="{place}">Go on to the page</a></p>', refresh)


def _refusal(status: HTTPStatus) -> str:
    advice = "<p>A start address is good for one use. For another, end medsilo approve --page and start it again.</p>"
    return _plain_page(status.phrase, f"<h1>{status.phrase}</h1>{advice if status is HTTPStatus.FORBIDDEN else ''}")


def _plain_page(title: str, body: str, head: str = "") -> str:
    top = f'<head><meta charset="utf-8"><title>{title}</title>{head}</head>'
    return f'<!doctype html><html lang="en">{top}<body>{body}</body></html>'
