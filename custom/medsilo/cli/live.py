"""Show on a terminal what goes on, with rich. Imported only where a person watches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

REFRESHES = 4  # a second


@contextmanager
def spinning(words: Callable[[], str]) -> Iterator[Callable[[str], None]]:
    """Show words, which are asked for again at every look; yields what prints a line above them."""
    spinner = Spinner("dots")

    def now() -> Spinner:
        spinner.update(text=Text(words()))
        return spinner

    with Live(get_renderable=now, refresh_per_second=REFRESHES, transient=True) as live:
        yield lambda line: live.console.print(Text(line))
