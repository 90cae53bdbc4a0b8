"""The hospital's own web server: on this machine's loopback address only, for the person who has the start address.

The start address holds a token that is good for one use, and is exchanged for a cookie. Everything else lies under a
path that nobody can guess, since a browser sends cookies of 127.0.0.1 to every port of it. A request must name this
server as its host, and one that changes something must come from a page of this server, with the session's own word.
"""

import secrets
import socket
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from medsilo.core.errors import MedsiloError

HOST = "127.0.0.1"
COOKIE = "medsilo"
START = "/start"
WORD = "word"  # the field of a form that only this session's pages know
MOST_BODY = 16_384  # bytes of a form
MOST_FIELDS = 50
MOST_AT_ONCE = 32  # connections
PATIENCE = 15.0  # seconds for a request and its answer
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
    "Connection": "close",
}


class NotServed(MedsiloError):
    """A request that the page answers with a status alone."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class PageServer(uvicorn.Server):
    """Serves a site to one person, in one session."""

    def __init__(self, site: ASGIApp, port: int = 0) -> None:
        """site: answers what was let in; port: 0 for any that is free. Raises OSError where it is taken."""
        self._listening = socket.create_server((HOST, port))
        self.gate = Gate(site, self._listening.getsockname()[1])
        config = uvicorn.Config(
            self.gate,
            loop="asyncio",
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # it says nothing of a connection that broke: that is nobody's business
            access_log=False,  # its lines would hold the token
            proxy_headers=False,
            server_header=False,
            headers=list(HEADERS.items()),
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)

    def serve_forever(self) -> None:
        """Serve until Ctrl-C, or until `should_exit` is set."""
        self.run([self._listening])


class Gate:
    """Lets the requests of one session in to a site; answers all others with a status alone."""

    def __init__(self, site: ASGIApp, port: int) -> None:
        self.base = f"/{secrets.token_urlsafe(24)}"
        self.session, self.word, self._token = (secrets.token_urlsafe(32) for _ in range(3))
        self.start = f"http://{HOST}:{port}{START}?token={self._token}"
        self._token_is_good = True
        self._hosts = [[f"{name}:{port}"] for name in (HOST, "localhost")]
        self._site = Mount(self.base, site)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        try:
            answer = await self._answer(Request(scope, receive))
        except NotServed as error:
            answer = _refusal(error.status)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> ASGIApp:
        """Return what answers a request; raises NotServed where it is not let in."""
        if request.method not in ("GET", "POST"):
            raise NotServed(HTTPStatus.NOT_IMPLEMENTED)
        if request.headers.getlist("host") not in self._hosts:  # somebody else's name, made to point to this machine
            raise NotServed(HTTPStatus.MISDIRECTED_REQUEST)
        if request.scope["path"] == START:
            return self._exchanged(request)
        base = request.scope["path"][: len(self.base)]
        if not _same(base, self.base) or not _same(request.cookies.get(COOKIE, ""), self.session):
            raise NotServed(HTTPStatus.FORBIDDEN)
        if request.method == "POST":
            fields = await _fields(request) if _is_from_own_page(request) else {}
            if not _same(fields.pop(WORD, ""), self.word):
                raise NotServed(HTTPStatus.FORBIDDEN)
            request.state.fields = fields
        request.state.word = self.word
        return self._site

    def _exchanged(self, request: Request) -> HTMLResponse:
        """Give the session's cookie for the token, which is good no more from now on."""
        good = self._token_is_good and _same(request.query_params.get("token", ""), self._token)
        if request.method != "GET" or not good:
            raise NotServed(HTTPStatus.FORBIDDEN)
        self._token_is_good = False
        # The page goes on by itself: what it asks for comes from this server, so the cookie is sent along.
        refresh = f'<meta http-equiv="refresh" content="0; url={self.base}/">'
        answer = _plain_page("medsilo", f'<p><a href="{self.base}/">Go on to the page</a></p>', refresh)
        answer.set_cookie(COOKIE, self.session, path=self.base, httponly=True, samesite="strict")
        return answer


class _Connection(H11Protocol):
    """One of few connections, and for a while only. uvicorn has no limit for idle ones, nor for a slow sender."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MOST_AT_ONCE:
            transport.abort()
        self.loop.call_later(PATIENCE, transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP with the headers of all answers, which uvicorn leaves out here."""
        lines = [b"HTTP/1.1 400 Bad Request", *map(b": ".join, self.server_state.default_headers)]
        self.transport.write(b"\r\n".join([*lines, b"", b""]))
        self.transport.close()


def _is_from_own_page(request: Request) -> bool:
    """Return whether a page of this server sends a form. Some browsers leave Origin out where one does."""
    own, headers = f"http://{request.headers['host']}", request.headers
    is_own = headers["origin"] == own if "origin" in headers else headers.get("referer", "").startswith(f"{own}/")
    return is_own and headers.get("sec-fetch-site", "same-origin") == "same-origin"


async def _fields(request: Request) -> dict[str, str]:
    """Read a form, without the fields that it has twice; raises NotServed for one that is no small form."""
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or "transfer-encoding" in request.headers:
        raise NotServed(HTTPStatus.LENGTH_REQUIRED)
    if int(length) > MOST_BODY:
        raise NotServed(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise NotServed(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
    try:
        body = (await request.body()).decode()
        read = parse_qs(body, keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise NotServed(HTTPStatus.BAD_REQUEST) from error
    return {name: values[0] for name, values in read.items() if len(values) == 1}


def _same(given: str, own: str) -> bool:
    return secrets.compare_digest(given.encode(), own.encode())


def _refusal(status: HTTPStatus) -> HTMLResponse:
    advice = "<p>A start address is good for one use. For another, end medsilo approve --page and start it again.</p>"
    body = f"<h1>{status.phrase}</h1>{advice if status is HTTPStatus.FORBIDDEN else ''}"
    return _plain_page(status.phrase, body, status=status)


def _plain_page(title: str, body: str, head: str = "", status: int = HTTPStatus.OK) -> HTMLResponse:
    top = f'<head><meta charset="utf-8"><title>{title}</title>{head}</head>'
    return HTMLResponse(f'<!doctype html><html lang="en">{top}<body>{body}</body></html>', status)
