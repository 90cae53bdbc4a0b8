"""The command line. Nothing heavy is imported before a command needs it: --help answers at once."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from medsilo import __version__
from medsilo.cli import (
    advising,
    hospital,
    leading,
    lists,
    plan_approval,
    results,
    reviewing,
    running,
    starting,
)
from medsilo.cli.command import Command
from medsilo.cli.show import command
from medsilo.cli.usage import Commands, one_line
from medsilo.core.errors import MedsiloError
from medsilo.core.text import plain
from medsilo.registry import COMMANDS as PLUGGED_IN

EPILOG = "'medsilo COMMAND --help' says what a command needs. It ends with 0 only when all it promised happened."
Example = tuple[Callable[..., int], str]
# With --json: a line per round or as soon as something is there, and one with the outcome.
LINE_BY_LINE = (running.run, running.resume, leading.watch, plan_approval.site_page)

# Every command of the engine with an example, by the people it serves; plug-ins bring more.
COMMANDS: dict[str, tuple[Example, ...]] = {
    "With all data on one machine": (
        (running.demo, "--seeds 0,1,2"),
        (starting.init, "/data/kidney -o study"),
        (running.run, "jobs/fedbn --set training.rounds=3 --set seed=1"),
        (running.compare, "--methods local,fedavg,harmofl --seeds 0,1,2 --set training.rounds=10"),
        (running.resume, "runs/fedavg-synthetic-histology-20261120-120000"),
    ),
    "For a consortium's lead": (
        (leading.pack, "jobs/fedavg --with-code -o dist/fedavg-with-code"),
        (leading.provision, "provisioning/consortium.yaml -o kits"),
        (
            leading.submit,
            'jobs/fedbn --kit kits/lead@clinic.example --set "participation.sites=[st-anna,university-clinic]"',
        ),
        (leading.status, "--kit KIT"),
        (leading.watch, "ID --kit KIT"),
        (leading.abort, "ID --kit KIT"),
        (leading.fetch, "ID --kit KIT"),
    ),
    "Of finished runs": (
        (results.report, "runs/one runs/other -o comparison.html"),
        (advising.advise, "--measure jobs/fedavg --rounds 5"),
        (results.cross, "runs/local"),
        (results.committee, "runs/adafed runs/ditto runs/fedbn"),
        (results.clean, "runs --older-than 30 --yes"),
    ),
    "For a hospital's engineer": (
        (hospital.predict, "supermodel scan.nii.gz folder-of-scans/ -o predictions"),
        (hospital.export, "runs/<run>/supermodel -o bundle"),
        (hospital.leak_report, "jobs/harmofl --local kits/st-anna/local"),
        (hospital.check, "--job jobs/fedavg --kit kits/st-anna --html check.html"),
        (plan_approval.approvals, "--kit kits/st-anna"),
        (plan_approval.approve, "3f9a01c2 --kit kits/st-anna --expires 30d --rounds 50"),
        (plan_approval.decline, "3f9a01c2 --kit kits/st-anna"),
        (plan_approval.withdraw, "3f9a01c2 --kit kits/st-anna"),
        (plan_approval.site_page, "--kit kits/st-anna"),
        (hospital.ledger, "show --kit kits/st-anna"),
        (reviewing.evidence, "jobs/fedavg --tests build/tests/test.xml -o evidence"),
    ),
    "What there is": (
        (lists.methods, ""),
        (lists.tasks, ""),
    ),
}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"medsilo {__version__}")
        raise typer.Exit


def _medsilo(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and end")
    ] = False,
) -> None:
    """Federated training of medical-imaging models on NVFlare."""


def all_commands(wanted: str = "") -> dict[str, list[Command]]:
    """Return the commands of the engine and of the plug-ins that come with it, by the people they serve.

    wanted: the command that is to run. One of another package is imported for that only, and then among these.
    """
    found = {title: [Command(does, example, title) for does, example in own] for title, own in COMMANDS.items()}
    for name in PLUGGED_IN:
        if name == wanted or PLUGGED_IN.package_of(name) is None:
            with suppress(*([] if name == wanted else [MedsiloError])):  # what is broken stops nothing else
                found.setdefault(PLUGGED_IN[name].people, []).append(PLUGGED_IN[name])
    return found


def _program(wanted: str = "") -> Any:
    """Return the program with all its commands; without rich, whose import costs more than all the rest."""
    app = typer.Typer(name="medsilo", cls=Commands, rich_markup_mode=None, epilog=EPILOG)
    app.callback()(_medsilo)
    for title, commands in all_commands(wanted).items():
        for one in commands:
            epilog = f"example: medsilo {one.name} {one.example}".rstrip()
            add = app.command(one.name, epilog=epilog, rich_help_panel=title)
            add(command(one.does, in_lines=one.does in LINE_BY_LINE))
    program: Any = typer.main.get_command(app)
    program.others = {name: PLUGGED_IN.package_of(name) for name in PLUGGED_IN if name not in program.commands}
    return program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 only when everything it promised happened, 1 if not, 2 after wrong use, 130 when stopped."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if arguments is None:  # a command of its own: what it writes is for this account, and it may be ended as by Ctrl-C
        os.umask(0o077)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        program = _program(given[0] if given else "")
        return program.main(given, prog_name="medsilo", standalone_mode=False, obj=given) or 0
    except typer.TyperException as error:
        print(f"medsilo: {plain(one_line(error, given))}", file=sys.stderr)
    except MedsiloError as error:  # a plug-in's command
        print(f"medsilo: {plain(str(error))}", file=sys.stderr)
    return 2


def parsed(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the command of a command line and the values of its options, checked; nothing is run."""
    program = _program()
    with program.make_context("medsilo", list(arguments)) as ctx:
        name, chosen, rest = program.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
        with chosen.make_context(name, rest, parent=ctx) as own:
            return name, dict(own.params)
