"""Answer wrong use of the command line with one line and the remedy. Usage is printed by --help only."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """The commands in groups, by the people they serve; a wrong name gets a suggestion."""

    others: Mapping[str, str | None] = {}  # commands of other packages, of which nothing is imported before they run

    def get_params(self, ctx: Any) -> Any:
        """Return the options; to check the None of typer's own flags, it would load pydantic."""
        params = super().get_params(ctx)
        for param in params:
            param.default = False if param.default is None else param.default
        return params

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write every command's whole first line, which the parent class would shorten."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            lines = (command.help or "").splitlines()
            sections.setdefault(str(getattr(command, "rich_help_panel", "")), []).append((name, lines[0]))
        for name, package in self.others.items():
            sections.setdefault("Of other packages", []).append((name, f"a command of package {package}"))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=14)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            raise typer.BadParameter(f"{name!r} is no command{_meant(name, list(self.commands))}", ctx=ctx)
        return super().resolve_command(ctx, args)


def _meant(given: str, known: Sequence[str]) -> str:
    near = get_close_matches(given.lower(), known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def one_line(error: Any, given: Sequence[str]) -> str:
    """Return what is wrong with a command line, and the remedy, in one line."""
    ctx = getattr(error, "ctx", None)
    # An option without its value is reported without its context.
    where = ctx.command_path if ctx else " ".join(["medsilo", *(word for word in given[:1] if word[:1] != "-")])
    head = "" if where == "medsilo" else where.removeprefix("medsilo ") + ": "
    text = " ".join(_in_words(error, given).removeprefix("Value error, ").split())
    return f"{head}{text.rstrip('.')} ('{where} --help' explains)"


def _in_words(error: Any, given: Sequence[str]) -> str:
    param, option = getattr(error, "param", None), getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        return f"there is no option {option}{_meant(option, error.possibilities or [])}"
    if option is not None:
        return f"{option} {'needs a value' if 'requires' in error.message else 'takes no value'}"
    if param is not None and error.message:
        return f"{_name(param)}: {error.message.removeprefix('Value error, ')}"
    if param is not None:
        return f"{_name(param)} is missing: {param.help or 'give it'}"
    if error.message == "Missing command.":
        return "give a command, for example 'medsilo demo'"
    unexpected = error.message.partition("unexpected extra argument")[2]
    if unexpected and "--json" in given:
        return f"{_within(unexpected)} is not expected here; to keep the JSON in a file, write --json > FILE"
    return f"{_within(unexpected)} is not expected here" if unexpected else error.message


def _within(text: str) -> str:
    """Return what stands in the last parentheses of a text."""
    return text.rpartition("(")[2].rstrip(").")


def _name(param: Any) -> str:
    return param.opts[0] if param.param_type_name == "option" else (param.metavar or param.name.upper())
