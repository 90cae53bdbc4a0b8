"""Show on a terminal what goes on, with rich. Imported only where a person watches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

REFRESHES = 4  # a second


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a heading."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


@contextmanager
def spinning(words: Callable[[], str]) -> Iterator[Callable[[str], None]]:
    """Show words that are asked for anew at every look; yields what prints a line above them."""
    spinner = Spinner("dots")

    def now() -> Spinner:
        spinner.update(text=Text(words()))
        return spinner

    with Live(get_renderable=now, refresh_per_second=REFRESHES, transient=True) as live:
        yield lambda line: live.console.print(Text(line))
