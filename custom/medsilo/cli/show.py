"""Write a command's output: lines for people, one JSON document for programs, and progress on a terminal.

rich is imported only where a person watches: --help and pipes do without it.
"""

import functools
import inspect
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medsilo.cli import options
from medsilo.core.errors import MedsiloError
from medsilo.core.text import plain, printable

if TYPE_CHECKING:
    from medsilo.runs.progress import StudyProgress
    from medsilo.site.settings import SiteSettings


@dataclass(frozen=True)
class Command:
    """A command: its function's name with dashes, its parameters are options, its docstring is the text of --help.

    >>> from medsilo.extend import Command, Console
    >>> def count(screen: Console, number: int = 3) -> None:
    ...     "Count."
    ...     screen.say(str(number))
    >>> Command(count, "--number 5", "For a hospital's engineer").name
    'count'
    >>> Command(count, "", "For a hospital's engineer", of="cases").name
    'cases count'
    >>> Command.settings(None).device
    'auto'
    """

    # The type of `out`: -o, a file of which it is tried at once whether it can be written.
    OutFile = Annotated[Path, options.OUT_FILE]

    does: Callable[..., int | None]  # gets a Screen first; returns another code than 0 where it did not succeed
    example: str  # arguments of an example
    people: str  # the heading that it is under
    of: str = ""  # the command that it is one of several acts of

    @property
    def name(self) -> str:
        """The command's full name, as a user types it."""
        return f"{self.of} {self.does.__name__.rstrip('_')}".strip().replace("_", "-")

    @staticmethod
    def settings(folder: Path | None) -> "SiteSettings":
        """Return a hospital's settings, of the folder with its medsilo.yaml; without one the defaults."""
        from medsilo.site.settings import SiteSettings

        own = options.folder_of_settings(folder)
        return SiteSettings.read(own) if own else SiteSettings()


BOLD, BAD, CAUTION = "1", "1;31", "1;33"  # a terminal's codes for styles
WARNING = "warning:"  # begins a line that a reader should see


def tint(text: str, style: str, stream: Any) -> str:
    """Return a text in bold or in colour, where a terminal shows it and NO_COLOR does not forbid it."""
    shows = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{style}m{text}\x1b[0m" if shows else text


MOST_SILENCE = 4.5  # seconds without output; the documentation promises at most five
LOOK = 0.2  # seconds between looks at whether something has to be said
STOPPED = "stopped"
AsJson = Annotated[
    bool, typer.Option("--json", help="print JSON on stdout, for programs; lines for people go to stderr")
]
Does = Callable[..., int | None]
Progress = Callable[[], str]


class Console:
    """The output of one command. With `as_json`, stdout has JSON only.

    >>> screen = Console()
    >>> screen.say("model: 3 of 4")
    model: 3 of 4
    >>> screen.answer(cases=3)
    >>> screen.document
    {'cases': 3}
    """

    def __init__(self, as_json: bool = False, silence: float = MOST_SILENCE) -> None:
        """silence: seconds of silence after which a running command reports its progress."""
        self.as_json = as_json
        self.in_lines = False  # JSON lines: one per event, the last with the outcome
        self.document: Any = {}
        self.goes_on = ""  # in words, the way to continue stopped work
        self.watched = sys.stdout.isatty() and not as_json
        self._print: Callable[[str], None] | None = None  # prints a line above the live display
        self._silence, self._said = silence, time.monotonic()
        self._saying = threading.Lock()
        self._doing: Progress | None = None  # the present work, in words
        self._aside = False  # whether that is for a person at the terminal alone
        self._watcher: threading.Thread | None = None  # breaks the silence
        self._ended = threading.Event()

    def say(self, *lines: str) -> None:
        """Print lines for a person to read."""
        if not lines:
            return
        text = "\n".join(map(printable, "\n".join(lines).split("\n")))
        with self._saying:
            if self._print:
                self._print(text)
            else:
                stream = sys.stderr if self.as_json else sys.stdout
                warning = tint(WARNING, CAUTION, stream)
                print(re.sub(rf"^{WARNING}", lambda _: warning, text, flags=re.MULTILINE), file=stream, flush=True)
            self._said = time.monotonic()

    def begin(self, what: str) -> None:
        """Announce the beginning of some work.

        If the work takes long, report every few seconds that it goes on, until `close`.
        """
        self.say(what)
        self.doing(what)

    def doing(self, what: str | Progress, aside: bool = False) -> None:
        """Set the progress to report, a text or a function that gives one. aside: for a person at the terminal only."""
        self._aside = aside
        started = time.monotonic()
        self._doing = what if callable(what) else lambda: f"{what} ({time.monotonic() - started:.0f} s)"
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._break_silence, daemon=True)
            self._watcher.start()

    def end(self) -> None:
        """Stop the progress reports that `begin` started."""
        self._ended.set()
        if self._watcher:
            self._watcher.join()

    def _break_silence(self) -> None:
        """Report progress whenever nothing was printed for long and the terminal shows no progress."""
        with suppress(OSError):  # a pipe that nobody reads any more
            while not self._ended.wait(LOOK):
                if self._doing and self._print is None and time.monotonic() - self._said >= self._silence:
                    self.aside(self._doing()) if self._aside else self.say(self._doing())

    def warn(self, line: str) -> None:
        """Show a warning."""
        print(f"{tint('medsilo:', BAD, sys.stderr)} {plain(line)}", file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        """Say on a terminal what is being waited for; a pipe gets results only."""
        if sys.stderr.isatty():
            self.aside(f"{line} ...")
            self.doing(line, aside=True)

    def aside(self, line: str) -> None:
        """Show the present work on stderr, for people and logs."""
        print(printable(line), file=sys.stderr, flush=True)
        self._said = time.monotonic()

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Print one JSON line, where they are asked for."""
        if self.as_json and self.in_lines:
            print(json.dumps({"event": kind, **facts}, allow_nan=False, default=str), flush=True)

    def answer(self, **facts: Any) -> None:
        """Keep the facts for the JSON document that ends the command."""
        self.document = {**self.document, **facts}

    @contextmanager
    def rounds(self, progress: "StudyProgress") -> Iterator[Callable[[Any], None]]:
        """Show the rounds of a study, each passed to the yielded function, and the progress between them."""

        def on_round(record: Any) -> None:
            lines = progress.add(record)
            self.event("round", {"of": progress.planned, **progress.last})
            self.say(*lines)

        with self._watching(progress.sentence):
            yield on_round

    @contextmanager
    def busy(self, what: str) -> Iterator[Callable[[Progress], None]]:
        """Show that the work goes on, and for how long; yields a function that adds a source of details."""
        more: list[Progress] = [lambda: ""]
        started = time.monotonic()

        def words() -> str:
            told = ": ".join(filter(None, (what, more[-1]())))
            return f"{told} ({time.monotonic() - started:.0f} s)"

        with self._watching(words):
            yield more.append

    @contextmanager
    def _watching(self, words: Progress) -> Iterator[None]:
        """Show progress: on a terminal below the output, else after a long silence."""
        self.doing(words)
        if not self.watched:
            yield
            return
        with _spinning(words) as self._print:
            try:
                yield
            finally:
                self._print = None

    def fail(self, error: MedsiloError, code: int = 1) -> int:
        """Show the line of an error; return the exit code."""
        text = str(error) + (f" [{error.private}]" if error.private else "")
        self.warn(text)
        self.document = {**self.document, **failure(text, code, error)}
        return code

    def close(self, code: int) -> int:
        """Print the JSON that was asked for; return the exit code."""
        if self.as_json and self.in_lines:
            self.event("outcome", {"code": code, **self.document})
        elif self.as_json:
            print(json.dumps(self.document, indent=2, allow_nan=False, default=str), flush=True)
        return code


def failure(text: str, code: int, error: Exception | str) -> dict[str, Any]:
    """The JSON of a failed command. kind: "usage", "stopped", "plan", "data", ...; else "error"."""
    kind = error if isinstance(error, str) else type(error).__name__.removesuffix("Error").lower()
    return {"error": text, "code": code, "kind": "error" if kind == "medsilo" else kind}


def command(does: Does) -> Does:
    """Return the command with `--json` added, its screen given, and its errors shown as one line."""
    signature = inspect.signature(does)
    parameters = [value for name, value in signature.parameters.items() if name != "screen"]
    as_json = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson)

    @functools.wraps(does)
    def shown(*, as_json: bool, **values: Any) -> int:
        screen = Console(as_json)
        try:
            return screen.close(does(screen, **values) or 0)
        except MedsiloError as error:
            return screen.close(screen.fail(error))
        except KeyboardInterrupt:
            screen.warn(f"{STOPPED}; {screen.goes_on}" if screen.goes_on else STOPPED)
            screen.answer(**failure(STOPPED, 130, STOPPED))
            return screen.close(130)
        except BrokenPipeError:
            return 1
        except ModuleNotFoundError as error:  # a package that only some commands need is missing
            from medsilo.core.package import extra_with

            if not error.name or not (extra := extra_with(error.name)):
                raise
            return screen.close(screen.fail(MedsiloError(f"this needs the package {error.name}; install {extra}")))
        except OSError as error:  # a full disk, a folder that may not be read
            why = os.strerror(error.errno).lower() if error.errno else type(error).__name__
            told = MedsiloError(f"a file can't be read or written: {why}", error.filename or "")
            return screen.close(screen.fail(told))
        finally:
            screen.end()

    shown.__signature__ = signature.replace(parameters=[*parameters, as_json])  # type: ignore[attr-defined]
    return shown


REFRESHES = 4  # a second


@contextmanager
def _spinning(words: Callable[[], str]) -> Iterator[Callable[[str], None]]:
    """Show words that are updated at every look; yields the function that prints a line above them."""
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    spinner = Spinner("dots")

    def now() -> Spinner:
        spinner.update(text=Text(words()))
        return spinner

    with Live(get_renderable=now, refresh_per_second=REFRESHES, transient=True) as live:
        yield lambda line: live.console.print(Text(line))
