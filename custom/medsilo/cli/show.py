"""Write a command's output: lines of text for people, one JSON document for programs, and progress reports on a
terminal.

The package rich is imported only for a terminal, because its import is slow.
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
    """A command of the program medsilo.

    A Python function defines it: the function's name becomes the command's name, its parameters become the options, and
    its docstring becomes the help text.

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

    # the type of a parameter `out` for a writable output file (option --out or -o)
    OutFile = Annotated[Path, options.OUT_FILE]

    # the command's function: its first parameter is a Console; it returns a nonzero code after a failure
    does: Callable[..., int | None]
    example: str  # command-line arguments of an example
    people: str  # heading in the help: the role of the command's users
    of: str = ""  # the group of commands to which the command belongs

    @property
    def name(self) -> str:
        """Return the command's full name, which users type."""
        return f"{self.of} {self.does.__name__.rstrip('_')}".strip().replace("_", "-")

    @staticmethod
    def settings(folder: Path | None) -> "SiteSettings":
        """Return the settings in a hospital's folder, or the default settings if no folder is given.

        Args:
            folder: the folder with the hospital's medsilo.yaml; None for the defaults
        """
        from medsilo.site.settings import SiteSettings

        own = options.folder_of_settings(folder)
        return SiteSettings.read(own) if own else SiteSettings()


BOLD, BAD, CAUTION = "1", "1;31", "1;33"  # a terminal's codes for styles
WARNING = "warning:"  # prefix of lines that are highlighted


def tint(text: str, style: str, stream: Any) -> str:
    """Add bold or colour to a text if the stream is a terminal with colours and NO_COLOR is not set."""
    shows = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{style}m{text}\x1b[0m" if shows else text


# seconds without output after which progress is reported; the documentation promises at most five seconds
MOST_SILENCE = 4.5
LOOK = 0.2  # seconds between checks whether to report progress
STOPPED = "stopped"
AsJson = Annotated[
    bool, typer.Option("--json", help="print JSON for programs on stdout, and text for people on stderr")
]
Does = Callable[..., int | None]
Progress = Callable[[], str]


class Console:
    """Prints the output of one command; with `as_json`, only JSON goes to stdout.

    >>> screen = Console()
    >>> screen.say("model: 3 of 4")
    model: 3 of 4
    >>> screen.answer(cases=3)
    >>> screen.document
    {'cases': 3}
    """

    def __init__(self, as_json: bool = False, silence: float = MOST_SILENCE) -> None:
        """Create the output of a command.

        Args:
            as_json: whether to write JSON to stdout, and lines for people to stderr
            silence: seconds without output after which a running command reports its progress
        """
        self.as_json = as_json
        self.in_lines = False  # whether to write one JSON line per event
        self.document: Any = {}
        self.goes_on = ""  # end of the message after Ctrl-C, which explains how to continue
        self.watched = sys.stdout.isatty() and not as_json
        self._print: Callable[[str], None] | None = None  # a function that prints a line above the live display
        self._silence, self._said = silence, time.monotonic()
        self._saying = threading.Lock()
        self._doing: Progress | None = None  # describes the present work
        self._aside = False  # whether progress reports are shown only to a person at the terminal
        # the thread that reports progress after some seconds without output
        self._watcher: threading.Thread | None = None
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

    def begin(self, task: str) -> None:
        """Announce the command's next step, and report progress every few seconds until `end` is called."""
        self.say(task)
        self.doing(task)

    def doing(self, task: str | Progress, aside: bool = False) -> None:
        """Set the text that progress reports show about the current work.

        Args:
            task: a text, or a function that returns a text
            aside: whether to report progress only to a person at the terminal
        """
        self._aside = aside
        started = time.monotonic()
        self._doing = task if callable(task) else lambda: f"{task} ({time.monotonic() - started:.0f} s)"
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._break_silence, daemon=True)
            self._watcher.start()

    def end(self) -> None:
        """Stop the progress reports that `begin` started."""
        self._ended.set()
        if self._watcher:
            self._watcher.join()

    def _break_silence(self) -> None:
        """Report progress whenever a command has printed no output for several seconds."""
        with suppress(OSError):  # the process that reads the pipe may have ended
            while not self._ended.wait(LOOK):
                if self._doing and self._print is None and time.monotonic() - self._said >= self._silence:
                    self.aside(self._doing()) if self._aside else self.say(self._doing())

    def warn(self, line: str) -> None:
        """Print a warning to stderr."""
        print(f"{tint('medsilo:', BAD, sys.stderr)} {plain(line)}", file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        """Print the command's current step to stderr, but only on a terminal."""
        if sys.stderr.isatty():
            self.aside(f"{line} ...")
            self.doing(line, aside=True)

    def aside(self, line: str) -> None:
        """Print a line of progress to stderr."""
        print(printable(line), file=sys.stderr, flush=True)
        self._said = time.monotonic()

    def event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Print an event as a JSON line, but only for commands that print JSON lines.

        Args:
            kind: name of the event
            facts: further fields of the JSON line
        """
        if self.as_json and self.in_lines:
            print(json.dumps({"event": kind, **facts}, allow_nan=False, default=str), flush=True)

    def answer(self, **facts: Any) -> None:
        """Add facts to the JSON document that the command prints at its end."""
        self.document = {**self.document, **facts}

    @contextmanager
    def rounds(self, progress: "StudyProgress") -> Iterator[Callable[[Any], None]]:
        """Show a study's rounds, and the progress between rounds. Call the yielded function with the record of each
        round.
        """

        def on_round(record: Any) -> None:
            lines = progress.add(record)
            self.event("round", {"of": progress.planned, **progress.last})
            self.say(*lines)

        with self._watching(progress.sentence):
            yield on_round

    @contextmanager
    def busy(self, task: str) -> Iterator[Callable[[Progress], None]]:
        """Show what the command does and for how long. Call the yielded function with a function that returns further
        details.
        """
        more: list[Progress] = [lambda: ""]
        started = time.monotonic()

        def words() -> str:
            told = ": ".join(filter(None, (task, more[-1]())))
            return f"{told} ({time.monotonic() - started:.0f} s)"

        with self._watching(words):
            yield more.append

    @contextmanager
    def _watching(self, words: Progress) -> Iterator[None]:
        """Show progress below the output on a terminal. Elsewhere, print a progress line after some seconds without
        output.
        """
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
        """Print the message of an error, add it to the JSON document, and return the exit code.

        Args:
            error: the error; its private text is printed, too
            code: the exit code
        """
        text = str(error) + (f" [{error.private}]" if error.private else "")
        self.warn(text)
        self.document = {**self.document, **failure(text, code, error)}
        return code

    def close(self, code: int) -> int:
        """Print the command's JSON document if --json is given, and return the exit code."""
        if self.as_json and self.in_lines:
            self.event("outcome", {"code": code, **self.document})
        elif self.as_json:
            print(json.dumps(self.document, indent=2, allow_nan=False, default=str), flush=True)
        return code


def failure(text: str, code: int, error: Exception | str) -> dict[str, Any]:
    """Return the JSON document of a failed command.

    Args:
        error: the error, or the kind of error, such as "usage" or "stopped"
    """
    kind = error if isinstance(error, str) else type(error).__name__.removesuffix("Error").lower()
    return {"error": text, "code": code, "kind": "error" if kind == "medsilo" else kind}


def command(does: Does) -> Does:
    """Wrap a command's function: add the option --json, pass a Console, and print errors as one line."""
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
        except ModuleNotFoundError as error:  # a package that only some commands need may be missing
            from medsilo.core.package import extra_with

            if not error.name or not (extra := extra_with(error.name)):
                raise
            return screen.close(
                screen.fail(MedsiloError(f"this command needs the package {error.name}; install {extra}"))
            )
        except OSError as error:  # for example, a full disk or an unreadable folder raises OSError
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
    """Show a live status text on a terminal; the yielded function prints a line above the status."""
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    spinner = Spinner("dots")

    def now() -> Spinner:
        spinner.update(text=Text(words()))
        return spinner

    with Live(get_renderable=now, refresh_per_second=REFRESHES, transient=True) as live:
        yield lambda line: live.console.print(Text(line))
