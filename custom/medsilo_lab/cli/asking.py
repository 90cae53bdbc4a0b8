"""Ask a person questions at the terminal, or take the answers from options and files. The commands that make a data set
use this module.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.cli.options import option
from medsilo.cli.show import Console
from medsilo.core.errors import MedsiloError

if TYPE_CHECKING:
    from medsilo.site.data_set import DataSet
    from medsilo_lab.start.questions import Question

Said = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="answer to a question")]
Called = Annotated[
    list[str] | None,
    typer.Option("--call", metavar="WORD=NAME", help="let plans use NAME for the column, level or class WORD"),
]
Subgroups = Annotated[
    list[str] | None,
    typer.Option(
        "--subgroup",
        metavar="NAME=COLUMN",
        help=("report test scores by a subgroup of patients; for numbers, age=COLUMN:40,60 sets the limits of bands"),
    ),
]
AnswersFile = Annotated[Path | None, option("FILE", "a file with answers to the questions, as YAML lines KEY: VALUE")]
Yes = Annotated[
    bool, typer.Option("--yes", help="accept safe default answers, and stop at a question without a safe default")
]
Target = Annotated[str | None, option("COLUMN", "the column of the table that the network learns to predict")]


def answers_of(pairs: list[str] | None, file: Path | None) -> dict[str, str]:
    from medsilo.core.yaml_text import read_yaml

    values = read_yaml(file, "the answers", "YAML") if file else {}
    if not isinstance(values, dict):
        raise MedsiloError("--answers: give a file with KEY: VALUE in each line", str(file))
    found = {str(key): str(value) for key, value in values.items()}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals:
            raise MedsiloError(f"--set {pair}: write KEY=VALUE")
        found[key] = value
    return found


def called_by(pairs: list[str] | None) -> dict[str, str]:
    found = {}
    for pair in pairs or []:
        word, equals, name = pair.rpartition("=")
        if not (equals and word and name):
            raise MedsiloError(f"--call {pair}: write WORD=NAME")
        found[word] = name
    return found


def hospital_called(screen: Console, name: str) -> str:
    """Change the name of a hospital to a name that is valid in plans. If the name changes, print a line."""
    from medsilo.core.text import safe_name

    if not (own := safe_name(name)):
        raise MedsiloError(f"{name!r} can't be a hospital's name; use letters, digits, '.', '_' and '-'")
    if own != name:
        screen.say(f"hospital {name!r} is called {own} in the plan")
    return own


def asker(screen: Console, yes: bool) -> "Callable[[Question], str]":
    """Return a function that asks a person questions at the terminal. Without a terminal, the function accepts safe
    defaults, and stops at a question without a safe default.
    """
    from medsilo_lab.start.making import stop_at_questions

    def take(question: "Question") -> str:
        answer = stop_at_questions(question)
        screen.say(f"taken: {question.key}={answer}, as {question.text}")
        return answer

    return _asked if not yes and sys.stdin.isatty() else take


def _asked(question: "Question") -> str:
    print(f"\n{question.text}", file=sys.stderr)
    return str(typer.prompt(question.key, default=question.proposed, err=True))


def progress_on(screen: Console) -> Callable[[int], None]:
    """Return a function that shows the number of files that were read. For each file, this function must be called with
    the size of the file.
    """
    read = [0, 0]

    def progress(size: int) -> None:
        read[:] = read[0] + 1, read[1] + size
        if read[0] == 1:
            screen.doing(lambda: f"files read: {read[0]}, {read[1] >> 20} MiB")

    return progress


def lines_of(data_set: "DataSet") -> list[str]:
    lines = [f"{name}: {words}" for name, words in data_set.in_words()]
    lines += [f"left out: {why} ({count})" for why, count in data_set.left_out.items()]
    return [*lines, *(f"note: {what} ({count})" for what, count in data_set.notes.items())]
