"""Show on a terminal how something runs, with rich. Imported only where a person watches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress import Progress as Bars
from rich.progress import ProgressColumn, SpinnerColumn, Task, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from medsilo.study.progress import SiteProgress, StudyProgress, duration

STYLES = {"waiting": "dim", "asked": "dim", "answered": "green", "refused": "red", "lost": "red"}
LATE = "yellow"
REFRESHES = 4  # a second


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a heading."""
    table = _table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def board(progress: StudyProgress) -> RenderableType:
    """Return the state of a study: a row per site, the rounds done, the best so far, the time left."""
    table = _table("site", f"{progress.metric} before", "loss", "seconds", "")
    for name, now in progress.now().items():
        site = progress.sites.get(name, SiteProgress())
        table.add_row(
            Text(name),
            _value(site.score),
            _value(site.loss),
            "–" if site.seconds is None else f"{site.seconds:.1f}",
            Text(now, LATE if "late" in now else STYLES.get(now.partition(" ")[0], "")),
        )
    left = progress.seconds_left()
    facts = [f"round {progress.done} of {progress.planned}", f"{duration(progress.elapsed())} so far"]
    facts += [f"about {duration(left)} left"] if left else []
    facts += [f"best {progress.metric} {progress.best[1]:.3f} in round {progress.best[0]}"] if progress.best else []
    bar = Padding(ProgressBar(progress.planned, progress.done, width=40), (1, 0, 0, 0))
    told = [Text(line, "yellow") for lines in progress.standing_out.values() for line in lines]
    told += [Text(line, LATE) for line in progress.slow()]
    return Group(Padding(table, (1, 0, 0, 0)), *told, bar, Text("  ·  ".join(facts)))


def _value(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


@contextmanager
def shown_live(progress: StudyProgress) -> Iterator[Callable[[str], None]]:
    """Keep the board on the screen and up to date; yields what prints a line above it."""
    live = Live(get_renderable=lambda: board(progress), refresh_per_second=REFRESHES)
    with live:
        yield lambda line: live.console.print(Text(line))


class _Words(ProgressColumn):
    """A column of words that are asked for anew at every look."""

    max_refresh = 0.5

    def __init__(self, words: Callable[[], str]) -> None:
        super().__init__()
        self._words = words

    def render(self, task: Task) -> Text:
        return Text(self._words())


@contextmanager
def spinning(words: Callable[[], str]) -> Iterator[Callable[[str], None]]:
    """Show the words with the time that has passed; yields what prints a line above them."""
    with Bars(SpinnerColumn(), _Words(words), TimeElapsedColumn(), transient=True) as bars:
        bars.add_task("", total=None)
        yield lambda line: bars.console.print(Text(line))
