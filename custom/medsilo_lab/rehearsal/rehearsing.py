"""The command that walks through a whole consortium on this machine, by the commands that its people type: rehearse."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.cli import options
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError

FOLDER = Path("rehearsal")


def rehearse(
    screen: Console,
    consortium: Annotated[Path, typer.Argument(help="the consortium's file")] = Path("provisioning/consortium.yaml"),
    *,
    out: options.OutFolder = FOLDER,
    job: Annotated[Path, typer.Option(metavar="JOB", help="the job that is submitted")] = Path("jobs/fedavg"),
    changes: options.Changes,
    keep: Annotated[bool, typer.Option("--keep", help="at the end keep everything running until Ctrl-C")] = False,
) -> int:
    """Walk through a whole consortium on this machine, over mutual TLS, and show what each person types.

    Makes kits for everybody in the consortium's file, and starts server and hospitals. Then it checks, approves,
    submits, watches, fetches and stops. It shows the command of each step. Everything listens on this machine only.
    """
    from medsilo_lab.rehearsal.walk import Walk

    if out.exists():
        raise MedsiloError(f"{out} is there already; name another folder with -o, or remove it")
    screen.goes_on = f"all that it started is stopped; what was written is in {out}, and another -o starts again"
    with Walk(screen, consortium, out) as walk:
        run = walk.study(job, changes)
        if keep:
            screen.say(f"\nall run until Ctrl-C; type in another terminal: medsilo status --kit {walk.lead}")
            walk.wait()
        walk.stop()
    screen.say(
        f"\nall are stopped; in production each command is typed on a machine of its own\nreport: {run / 'report.html'}"
    )
    screen.answer(folder=out, run=run, commands=walk.typed)
    return 0


REHEARSE = Command(rehearse, "provisioning/consortium.yaml", "For a consortium's lead", of="kits")
