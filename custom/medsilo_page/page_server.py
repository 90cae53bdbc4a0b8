"""Serve a hospital's web page on this machine's loopback address, only for the person who has the start address.

The start address contains a one-time token, which is exchanged for a session cookie. All pages except the start address
are under a secret random path, because a browser sends the cookies of 127.0.0.1 to every port. Each request must name
this server as its host. A request that changes something must come from a page of this server, and contain the token of
the session.
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
WORD = "word"  # name of the form field that contains the token of the session
MOST_BODY = 16_384
MOST_FIELDS = 50
MOST_AT_ONCE = 32
# two time limits in seconds: for receiving a request, and for receiving and answering a request
PATIENCE, LONGEST = 5.0, 15.0
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
    """A request to which this server replies with an HTTP status, but with no page."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


class PageServer(uvicorn.Server):
    def __init__(self, site: ASGIApp, port: int = 0) -> None:
        """Listen on a port of the loopback address; raise OSError if the port is in use.

        Args:
            port: The port; 0 selects a free port.
        """
        self._listening = socket.create_server((HOST, port))
        self.gate = Gate(site, self._listening.getsockname()[1])
        config = uvicorn.Config(
            self.gate,
            loop="asyncio",
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # hides uvicorn's log messages about broken connections
            access_log=False,  # the access log would contain the one-time token
            proxy_headers=False,
            server_header=False,
            headers=list(HEADERS.items()),
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)

    def serve_forever(self) -> None:
        self.run([self._listening])


class Gate:
    """Admits only the requests of one session, and answers any other request with an HTTP status only."""

    def __init__(self, site: ASGIApp, port: int) -> None:
        self.base = f"/{secrets.token_urlsafe(24)}"
        self.session, self.word, self._token = (secrets.token_urlsafe(32) for _ in range(3))
        self.start = f"http://{HOST}:{port}{START}?token={self._token}"
        self._token_is_good = True
        self._hosts = [[f"{name}:{port}"] for name in (HOST, "localhost")]
        self._site = Mount(self.base, site)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(Request(scope, receive))
        except NotServed as error:
            answer = _refusal(error.status)
        await answer(scope, receive, send)

    async def _answer(self, request: Request) -> ASGIApp:
        """Choose the app that answers a request; raise NotServed if the request is not admitted."""
        if request.method not in ("GET", "POST"):
            raise NotServed(HTTPStatus.NOT_IMPLEMENTED)
        # rejects every host name except localhost, even if the name resolves to this machine
        if request.headers.getlist("host") not in self._hosts:
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
        good = self._token_is_good and _same(request.query_params.get("token", ""), self._token)
        if request.method != "GET" or not good:
            raise NotServed(HTTPStatus.FORBIDDEN)
        self._token_is_good = False
        # The answer that sets the cookie contains a refresh, by which the browser loads the first page. The refresh is
        # needed because a browser sends the cookie only if a page of this server causes the request.
        refresh = f'<meta http-equiv="refresh" content="0; url={self.base}/">'
        answer = _plain_page("medsilo", f'<p><a href="{self.base}/">Go on to the page</a></p>', refresh)
        answer.set_cookie(COOKIE, self.session, path=self.base, httponly=True, samesite="strict")
        return answer


class _Connection(H11Protocol):
    """A connection that must finish its request within a time limit. The number of open connections of the server is
    limited.

    uvicorn limits neither idle connections nor connections that send slowly.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.begun = self.loop.time()
        # closes the connection that has been silent for the longest time, so that silent connections cannot block the
        # page
        if len(self.connections) > MOST_AT_ONCE:
            all_of_ours = (
                connection
                for connection in self.connections
                if isinstance(connection, _Connection) and connection is not self
            )
            silent = [one for one in all_of_ours if one.cycle is None]
            min(silent, key=lambda one: one.begun, default=self).transport.abort()
        self.loop.call_later(PATIENCE, self._give_up)
        self.loop.call_later(LONGEST, transport.abort)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.more_body:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP, because uvicorn's own answer would lack the security headers."""
        lines = [b"HTTP/1.1 400 Bad Request", *map(b": ".join, self.server_state.default_headers)]
        self.transport.write(b"\r\n".join([*lines, b"", b""]))
        self.transport.close()


def _is_from_own_page(request: Request) -> bool:
    """Return True if a form comes from a page of this server. If the browser omits the header Origin, the header
    Referer is checked.
    """
    own, headers = f"http://{request.headers['host']}", request.headers
    is_own = headers["origin"] == own if "origin" in headers else headers.get("referer", "").startswith(f"{own}/")
    return is_own and headers.get("sec-fetch-site", "same-origin") == "same-origin"


async def _fields(request: Request) -> dict[str, str]:
    """Return the fields of a form, each of which may occur only once; raise NotServed if the form is missing or too
    large.
    """
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


def _same(text: str, secret: str) -> bool:
    return secrets.compare_digest(text.encode(), secret.encode())


def _refusal(status: HTTPStatus) -> HTMLResponse:
    advice = (
        "<p>A start address is good for one use. For another, end the command that printed it, and start it again.</p>"
    )
    body = f"<h1>{status.phrase}</h1>{advice if status is HTTPStatus.FORBIDDEN else ''}"
    return _plain_page(status.phrase, body, status=status)


def _plain_page(title: str, body: str, head: str = "", status: int = HTTPStatus.OK) -> HTMLResponse:
    top = f'<head><meta charset="utf-8"><title>{title}</title>{head}</head>'
    return HTMLResponse(f'<!doctype html><html lang="en">{top}<body>{body}</body></html>', status)
