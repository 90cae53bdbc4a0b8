"""The command line of medsilo.

To keep `--help` fast, a command imports large packages such as PyTorch only when it runs.
"""

import atexit
import codecs
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from io import TextIOWrapper
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from medsilo.cli import documentation, hospital, review
from medsilo.cli.show import BAD, BOLD, Command, command, failure, tint
from medsilo.core.errors import MedsiloError
from medsilo.core.package import attach_again, from_lab
from medsilo.core.text import plain
from medsilo.core.version import __version__
from medsilo.registry import PluginTable

EPILOG = "'medsilo COMMAND --help' says what a command needs. It ends with 0 only if everything succeeded."
Example = tuple[Callable[..., int | None], str]

# For each role of users: the engine's commands, each with an example. Installed packages can add commands to
# this list.
COMMANDS: dict[str, tuple[Example, ...]] = {
    "To begin with": (),
    "With all data on one machine": (),
    "For a consortium's lead": (),
    "Of finished runs": (),
    "For a hospital's engineer": (
        (hospital.check, "jobs/fedavg --kit kits/st-anna"),
        (review.disclosure, "jobs/harmofl --kit kits/st-anna"),
        (review.approve, "3f9a01c2 --kit kits/st-anna --expires 30d --rounds 50"),
        (review.page, "--kit kits/st-anna"),
        (hospital.ledger, "show --kit kits/st-anna"),
        (hospital.logs, "--kit kits/st-anna --follow"),
        (hospital.prune, "runs --older-than 30 --yes"),
    ),
    "Lists and documentation": (
        (review.list_, ""),
        (documentation.docs, "training.learning_rate"),
    ),
}
PLUGGED_IN = PluginTable("medsilo.commands", "medsilo.cli.show:Command", {})
HELP = {"help_option_names": ["--help", "-h"]}
# Command names of other programs, each with the corresponding command of medsilo.
OTHERWISE = {
    "abort": "medsilo cancel ID --kit KIT",
    "evaluate": "medsilo release test RELEASE, or the test scores in a run's report",
    "export": "medsilo release export RUN",
    "fit": "medsilo run JOB",
    "log": "'medsilo status ID --watch --kit KIT' for a job's rounds; a run's are in its folder, rounds.jsonl",
    "poc": "medsilo kits make CONSORTIUM, with 'host: localhost' in that file",
    "provision": "medsilo kits make CONSORTIUM",
    "simulator": "medsilo run JOB",
    "start": "'medsilo run JOB' here, 'medsilo submit JOB --kit KIT' in a consortium; startup/start.sh starts a kit",
    "stop": "'medsilo cancel ID --kit KIT' for a job, Ctrl-C for a run; startup/stop_fl.sh stops a kit",
    "train": "medsilo run JOB",
}
# The order of commands in the help text. Commands that this list does not name follow in the order of their
# registration.
ORDER = (
    *("init", "example", "demo", "run", "compare", "resume", "kits", "submit", "canary", "status", "download"),
    *("cancel", "release", "check", "disclosure", "approve", "page"),
)
GPU_OPTIONS = ("--gpu", "--gpus", "--cuda")
# Options of NVFlare's simulator, with the corresponding medsilo options.
NVFLARE_OPTIONS = {"-t": "--threads", "-w": "--out", "--workspace": "--out"}


SIMPLE = str.maketrans(
    {"−": "-", "–": "-", "→": "->", "≥": ">=", "≤": "<=", "±": "+-", "×": "x", "…": "...", "ε": "epsilon"}
)


def simplified(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that a terminal cannot encode by similar ASCII characters; an error handler for `codecs`."""
    assert isinstance(error, UnicodeEncodeError)
    return error.object[error.start : error.end].translate(SIMPLE).encode("ascii", "replace").decode(), error.end


class OneCommand(TyperCommand):
    """A command whose help text shows every argument by its name in capitals, without its Python type."""

    def get_params(self, ctx: Any) -> Any:
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if param.param_type_name == "argument":
                param.display_type_rich = lambda ctx: None
                param.metavar = param.metavar or param.name.upper()
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line. A mandatory argument has no brackets, as in other programs."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class Commands(TyperGroup):
    """A group of commands with a help section for each role, and suggestions for unknown commands."""

    others: Mapping[str, str | None] = {}  # the package of each command whose package is not imported

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters with the default False in place of None, because typer would load the slow pydantic to
        check None.
        """
        params: list[Any] = super().get_params(ctx)
        for param in params:
            param.default = False if param.default is None else param.default
        return params

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with the full first line of their help texts, which the parent class would shorten."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, listed in self.commands.items():
            lines = (listed.help or "").splitlines()
            sections.setdefault(str(getattr(listed, "rich_help_panel", "")), []).append((name, lines[0]))
        for name, package in self.others.items():
            sections.setdefault("Of other packages", []).append((name, f"a command of package {package}"))
        for title, rows in sections.items():
            with formatter.section(tint(title, BOLD, sys.stdout)):
                formatter.write_dl([(tint(name, BOLD, sys.stdout), line) for name, line in rows], col_max=14)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        whole = f"{ctx.command_path} {name}"
        if name not in self.commands and (other := OTHERWISE.get(whole.partition(" ")[2])):
            raise typer.BadParameter(f"{name!r} is no command; use {other}", ctx=ctx)
        groups = {group: getattr(command, "commands", {}) for group, command in self.commands.items()}
        if within := [f"{ctx.command_path} {group} {name}" for group, own in groups.items() if name in own]:
            raise typer.BadParameter(f"{name!r} is no command; use {' or '.join(within)}", ctx=ctx)
        if name not in self.commands and not name.startswith("-"):
            waits = attach_again("medsilo.commands", name)
            told = f"{name!r} is no command{f'; {waits}' if waits else _meant(name, list(self.commands))}"
            raise typer.BadParameter(told + from_lab("those for researchers and leads"), ctx=ctx)
        return super().resolve_command(ctx, args)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"medsilo {__version__}")
        raise typer.Exit


def _medsilo(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="show the version and end")
    ] = False,
) -> None:
    """Federated training of medical-imaging models on NVFlare."""


def all_commands(wanted: str = "") -> dict[str, list[Command]]:
    """Return the commands of the engine and its plug-ins, by the role of their users.

    A plug-in of another package is imported only if its command is `wanted`; without the import, its commands are left
    out.
    """
    found = {title: [Command(does, example, title) for does, example in own] for title, own in COMMANDS.items()}
    for name in PLUGGED_IN:
        asked = name.partition(".")[0] == wanted
        if asked or PLUGGED_IN.package_of(name) is None:
            # a faulty package must not stop the commands of other packages
            with suppress(*([] if asked else [MedsiloError])):
                found.setdefault(PLUGGED_IN[name].people, []).append(PLUGGED_IN[name])
    return {title: sorted(own, key=_rank) for title, own in found.items()}


def _rank(command: Command) -> int:
    name = command.name.partition(" ")[0]
    return ORDER.index(name) if name in ORDER else len(ORDER)


def _program(wanted: str = "") -> Any:
    """Return the command-line program with all commands; rich is not used, because its import is slow."""
    app = typer.Typer(name="medsilo", cls=Commands, rich_markup_mode=None, epilog=EPILOG, context_settings=HELP)
    app.callback()(_medsilo)
    groups: dict[str, typer.Typer] = {"": app}
    for title, commands in all_commands(wanted).items():
        for one in commands:
            if one.of not in groups:
                about = sys.modules[one.does.__module__].__doc__
                groups[one.of] = typer.Typer(cls=Commands, rich_markup_mode=None, help=about)
                app.add_typer(groups[one.of], name=one.of, rich_help_panel=title)
            epilog = f"example: medsilo {one.name} {one.example}".rstrip()
            name = one.name.rpartition(" ")[2]
            add = groups[one.of].command(name, cls=OneCommand, epilog=epilog, rich_help_panel=title)
            add(command(one.does))
    program: Any = typer.main.get_command(app)
    first = {name.partition(".")[0]: PLUGGED_IN.package_of(name) for name in PLUGGED_IN}
    program.others = {name: package for name, package in first.items() if name not in program.commands}
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of medsilo, and return the command's exit code.

    The exit code is 0 after success, 1 after a failure, 2 after a wrong command line, and 130 after an interruption.
    """
    given = _by_options(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:  # if medsilo runs as a program, only this account may read new files
        os.umask(0o077)
        # skips Python's garbage collection at exit, which would take a fifth of the time of `medsilo status`
        atexit.register(gc.freeze)
        codecs.register_error("simplified", simplified)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="simplified")  # a terminal may be unable to encode some characters
    try:
        program = _program(given[0] if given else "")
        return program.main(given, prog_name="medsilo", standalone_mode=False) or 0
    except typer.TyperException as error:
        said = one_line(error, given)
    except MedsiloError as error:  # a plug-in that cannot be loaded raises MedsiloError
        said = str(error)
    print(f"{tint('medsilo:', BAD, sys.stderr)} {plain(said)}", file=sys.stderr)
    if "--json" in given:
        print(json.dumps(failure(plain(said), 2, "usage"), indent=2))
    return 2


def _by_options(arguments: Sequence[str]) -> list[str]:
    """Let `medsilo help` and `medsilo version` mean --help and --version."""
    given = list(arguments)
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    if given[:1] == ["version"]:
        given = ["--version"]
    return given


# ---------------------------------------------------------------------------------------------------- wrong use
def _meant(word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word.lower(), known, 1)
    return f"; did you mean {near[0]}?" if near else ""


def one_line(error: Any, arguments: Sequence[str]) -> str:
    ctx = getattr(error, "ctx", None)
    # if the value of an option is missing, typer's error has no context, and thus no command's name
    where = ctx.command_path if ctx else " ".join(["medsilo", *(word for word in arguments[:1] if word[:1] != "-")])
    head = "" if where == "medsilo" else where.removeprefix("medsilo ") + ": "
    text = " ".join(_in_words(error, arguments).removeprefix("Value error, ").split())
    return f"{head}{text.rstrip('.')} ('{where} --help' explains)"


def _in_words(error: Any, arguments: Sequence[str]) -> str:
    param, option = getattr(error, "param", None), getattr(error, "option_name", None)
    ctx: Any = getattr(error, "ctx", None)
    if option is not None and hasattr(error, "possibilities"):
        meant = (
            _rows_of(ctx, option)
            or _device_of(ctx, option, arguments)
            or _argument_of(ctx, option)
            or _option_like(ctx, option)
        )
        if not meant and (key := _of_the_plan(ctx, option)):
            meant = f": it is in the plan, --set {key}=VALUE"
        return f"there is no option {option}{meant}"
    if option is not None:
        return f"{option} {'needs a value' if 'requires' in error.message else 'takes no value'}"
    if param is not None and error.message:
        message = error.message.removeprefix("Value error, ").replace("Input should be", "give a number")
        if "unable to parse" in message:
            message = f"give a {'whole number' if 'integer' in message else 'number'}"
        return f"{_name(param)}: {message}"
    if param is not None:
        return f"{_name(param)} is missing: {param.help or 'give it'}"
    if error.message == "Missing command.":
        own = getattr(ctx.command, "commands", {}) if ctx and ctx.parent else {}
        return f"give a command: {', '.join(own)}" if own else "give a command, for example 'medsilo run fedavg'"
    unexpected = error.message.partition("unexpected extra argument")[2].rpartition("(")[2].rstrip(").")
    if unexpected and "--json" in arguments:
        return f"{unexpected} is not expected here; to keep the JSON in a file, write --json > FILE"
    return (
        f"{unexpected} is not expected here{_change_of(ctx, unexpected, arguments) or _one_of(ctx)}"
        if unexpected
        else error.message
    )


def _params(ctx: Any, kind: str) -> list[Any]:
    return [param for param in ctx.command.params if param.param_type_name == kind] if ctx else []


def _rows_of(ctx: Any, option: str) -> str:
    """If the user tried an option such as --sweep, explain how to compare several values of a key."""
    compares = any("--methods" in one.opts for one in _params(ctx, "option"))
    told = "; give each value a row: --methods fedprox:mu=0.1,fedprox:mu=1"
    return told if compares and option in ("--sweep", "--grid", "--search") else ""


def _option_like(ctx: Any, option: str) -> str:
    """Suggest the option whose name is most similar to the user's option, without regard to dashes."""
    names = {name.strip("-"): name for one in _params(ctx, "option") for name in one.opts}
    named = NVFLARE_OPTIONS.get(option, option).strip("-")
    near = get_close_matches(named.lower(), [name for name in names if len(name) > 1] + ["help"], 1)
    return f"; did you mean {names.get(near[0], '--help')}?" if near else ""


def _argument_of(ctx: Any, option: str) -> str:
    """Suggest the positional argument that corresponds to an unknown option."""
    words = (option.strip("-").upper(), option.strip("-").upper() + "S")
    names = (_name(one) for one in _params(ctx, "argument") if {_name(one), one.name.upper()} & {*words})
    return next((f"; give {name} without {option}" for name in names), "")


def _one_of(ctx: Any) -> str:
    """If the user gave several values to a command that takes one argument, suggest giving one."""
    taken = _params(ctx, "argument")
    return f"; give one {_name(taken[0])}" if len(taken) == 1 and taken[0].nargs == 1 else ""


def _device_of(ctx: Any, option: str, arguments: Sequence[str]) -> str:
    """For an option such as --gpu, suggest the option --device if the command has it."""
    if option not in GPU_OPTIONS or not ctx or not any("--device" in param.opts for param in ctx.command.params):
        return ""
    words = " ".join(arguments).replace("=", " ").split()
    number = next((after for word, after in pairwise(words) if word == option and after.isdecimal()), "0")
    return f"; write --device cuda:{number}"


def _change_of(ctx: Any, unexpected: str, arguments: Sequence[str]) -> str:
    """Suggest the correct form of a plan's change if the user left out --set or the equals sign."""
    if not ctx or not any("--set" in param.opts for param in ctx.command.params):
        return ""
    words = [*arguments]
    if "=" in unexpected:
        return f"; write --set {unexpected}"
    lists = {name for one in ctx.command.params if "," in (one.metavar or "") for name in one.opts}
    if listed := next((after for name, after in pairwise(words) if name in lists), ""):
        return f"; separate with commas: {listed},{unexpected}"
    key = next(
        (
            one
            for mark, one, value in zip(words, words[1:], words[2:], strict=False)
            if mark == "--set" and value == unexpected and "=" not in one
        ),
        "",
    )
    return f"; write --set {key}={unexpected}" if key else ""


def _of_the_plan(ctx: Any, option: str) -> str | None:
    """If the command has --set, return the plan's key that is most similar to an unknown option."""
    if not ctx or not any("--set" in param.opts for param in ctx.command.params):
        return None
    from medsilo.cli.plan_keys import keys_of_plans
    from medsilo.core.wording import near_key

    word = option.strip("-").replace("-", "_")
    keys = keys_of_plans()
    return near_key(word, ["seed"], keys) or near_key(f"{word}s", [], keys)


def _name(param: Any) -> str:
    return param.opts[0] if param.param_type_name == "option" else (param.metavar or param.name.upper())
