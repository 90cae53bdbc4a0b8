"""Serve a local page about a run or a comparison that is running (option `--live`). A button on the page stops the run
or the comparison.

The page is optional, because its server opens a port. The server does not slow down training, because it only reads
files.
"""

import os
import signal
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from medsilo.core.errors import MedsiloError
from medsilo.runs import paths
from medsilo.runs.reading import read_rounds
from medsilo.runs.rounds import Round
from medsilo.runs.score import number_text
from medsilo_page.charts import Series, line_chart, swatch, values_of
from medsilo_page.local_pages import LocalPages
from medsilo_page.page_server import PageServer

HERE = Path(__file__).parent
MOST_LINES = 8
MOST_ROWS = 200


@dataclass(frozen=True)
class _Line:
    """A curve in the chart. The chart of a comparison has a curve for each run, and the chart of a run has a curve for
    each site.
    """

    name: str
    values: list[float | None]


@contextmanager
def shown_live(folder: Path, title: str, say: Callable[[str], None]) -> Iterator[None]:
    """Serve a page about a folder of runs until the `with` block ends. `say` receives the page's address."""
    server = PageServer(LivePage(folder, title).site())
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    say(f"live page, for a browser on this machine, good for one use: {server.gate.start}")
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(5)


class LivePage(LocalPages):
    def __init__(self, folder: Path, title: str, stop: Callable[[], None] | None = None) -> None:
        """`stop` is a function that ends the run. The default function interrupts this program, as Ctrl-C does."""
        super().__init__(HERE)
        self.folder, self.title = folder, title
        self._stop = stop or (lambda: os.kill(os.getpid(), signal.SIGINT))

    def site(self) -> Starlette:
        routes = [
            Route("/", self._shown),
            Route("/stop", self._stopped, methods=["POST"]),
            *self.files(),
        ]
        return Starlette(routes=routes)

    def _shown(self, request: Request) -> Response:
        found = sorted(self.folder.glob(f"*/{paths.ROUNDS}"), key=lambda path: (-path.stat().st_mtime_ns, path))
        runs = [path.parent for path in found] or [self.folder]  # the run with the newest file comes first
        read = {run.name: _rounds(run) for run in runs}
        several = runs != [self.folder]
        lines = [_Line(name, _means(own)) for name, own in read.items()] if several else _of_sites(read[runs[0].name])
        return self.page(
            "live.html",
            request,
            self.title,
            chart=_chart(lines),
            legend=[{"name": one.name, "swatch": swatch(style)} for style, one in enumerate(lines[:MOST_LINES])],
            left_out=max(0, len(lines) - MOST_LINES),
            heads=["Run", "Rounds", "Validation"] if several else ["Round", "Sites that answered", "Validation"],
            rows=_rows_of_runs(read) if several else _rows_of_rounds(read[runs[0].name]),
        )

    def _stopped(self, request: Request) -> Response:
        self._stop()
        return RedirectResponse(f"{request.scope['root_path']}/", HTTPStatus.SEE_OTHER)


def _rounds(run: Path) -> list[Round]:
    try:
        return read_rounds(run, growing=True)
    except MedsiloError:  # an incomplete file counts as empty; it may be complete when the page is loaded again
        return []


def _of_sites(rounds: list[Round]) -> list[_Line]:
    sites = sorted({site for line in rounds for site in line.sites})
    return [_Line(site, [_validated(line, site) for line in rounds]) for site in sites]


def _validated(line: Round, site: str) -> float | None:
    own = line.sites.get(site)
    return own.validation if own else None


def _mean(line: Round) -> float | None:
    known = [site.validation for site in line.sites.values() if site.validation is not None]
    return statistics.fmean(known) if known else None


def _means(rounds: list[Round]) -> list[float | None]:
    return [_mean(line) for line in rounds]


def _chart(lines: list[_Line]) -> Any:
    series = [Series(one.name, one.values, style) for style, one in enumerate(lines[:MOST_LINES])]
    if not values_of(series):
        return None
    return line_chart(series, key="live", title="Validation by round", x_label="rounds", y_label="validation score")


def _rows_of_rounds(rounds: list[Round]) -> list[list[str]]:
    return [[str(line.round), str(len(line.answered)), number_text(_mean(line))] for line in rounds[-MOST_ROWS:]][::-1]


def _rows_of_runs(read: dict[str, list[Round]]) -> list[list[str]]:
    return [
        [name, str(rounds[-1].round), number_text(_mean(rounds[-1]))] if rounds else [name, "0", "–"]
        for name, rounds in [*read.items()][:MOST_ROWS]
    ]
