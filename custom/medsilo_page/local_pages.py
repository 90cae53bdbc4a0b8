"""Serve pages to a browser on this machine, together with the pages' style and script."""

from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from medsilo.core.text import duration, printable, size_text
from medsilo.core.version import __version__
from medsilo.site.accepted_settings import moment
from medsilo_page.frame import STYLE, templates_in

HERE = Path(__file__).parent


class LocalPages:
    """The functions that all local web pages share.

    Characters that change the direction of text are removed from texts of other machines, because such characters can
    make a text look like another text.
    """

    def __init__(self, *folders: Path) -> None:
        self._pages = templates_in(HERE, *folders)
        self._pages.finalize = _shown_plain
        self._pages.filters |= {"moment": moment, "size": size_text, "duration": duration}

    def files(self) -> list[Route]:
        return [Route("/page.css", self._style), Route("/page.js", self._script)]

    def page(
        self, name: str, request: Request, title: str, status: HTTPStatus = HTTPStatus.OK, **content: Any
    ) -> Response:
        about = {"title": title, "version": __version__, "base": f"{request.scope['root_path']}/"}
        text = self._pages.get_template(name).render(**about, word=request.state.word, **content)
        return HTMLResponse(text, status)

    def _style(self, request: Request) -> Response:
        text = STYLE.read_text("utf-8").replace("<style>", "").replace("</style>", "")
        return Response(text + (HERE / "page.css").read_text("utf-8"), media_type="text/css")

    def _script(self, request: Request) -> Response:
        return Response((HERE / "page.js").read_text("utf-8"), media_type="text/javascript")


def _shown_plain(value: Any) -> Any:
    return "\n".join(map(printable, value.split("\n"))) if type(value) is str else value
