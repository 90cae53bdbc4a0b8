"""Make the kits of a consortium, back a server up, restore it, or try everything on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.cli import options
from medsilo.cli.options import option, several
from medsilo.cli.show import Command, Console


def make(
    screen: Console,
    consortium: Annotated[Path, typer.Argument(help="the consortium's file, like provisioning/consortium.yaml")],
    *,
    out: options.OutFolder,
    renew: Annotated[list[str], several("NAME", "give NAME a new certificate")],
    requests: Annotated[
        bool,
        typer.Option(
            "--requests", help="instead of kits, make what each party needs to create its own key and request"
        ),
    ] = False,
) -> None:
    """Make signed kits for a consortium, or for its new members.

    Existing kits are not changed. provisioning/README.md says who gets which kit, and what to keep safe.
    """
    from medsilo_lab.consortium.description import read_consortium
    from medsilo_lab.consortium.provision import provision, write_requests

    described = read_consortium(consortium)
    if requests:
        write_requests(described, out)
        screen.say(f"requests: {out}; provisioning/README.md says how each party goes on")
        screen.answer(requests=out)
        return
    new = provision(described, out, renew)
    screen.say(*(f"kit: {out / name}" for name in new))
    screen.say(f"new kits: {len(new)}; the others are as they were. Keep {out / 'private-root'} to yourself")
    screen.answer(kits=[out / name for name in new])


def backup(
    screen: Console, kit: Annotated[Path, typer.Argument(help="the server's kit")], *, out: options.OutFile
) -> None:
    """Write all that a server needs to start again into one file, also while it runs.

    This includes its kit with the studies and the list of expelled hospitals, and the jobs in server.storage. The file
    holds the server's private key: keep it encrypted, elsewhere.
    """
    from medsilo_lab.consortium.backup import back_up

    screen.note(f"reading {kit}")
    kept = back_up(kit, out)
    screen.say(f"backup: {out}, {kept.files} files; expelled: {', '.join(kept.expelled) or 'nobody'}")
    screen.answer(backup=out, files=kept.files, expelled=kept.expelled)


def restore(
    screen: Console,
    file: Annotated[Path, typer.Argument(help="what 'medsilo kits backup' wrote")],
    *,
    kit: Annotated[Path, option("KIT", "new folder for the server's kit")],
    storage: Annotated[Path | None, option("FOLDER", "new folder for its jobs (default: storage/ in the kit)")] = None,
    expelled: Annotated[list[str], several("NAME", "a hospital that you expelled after the backup; may be repeated")],
) -> None:
    """Put a server's kit and its jobs back from a backup, into these folders alone. Nothing is overwritten."""
    from medsilo_lab.consortium.backup import put_back

    screen.note(f"reading {file}")
    kept = put_back(file, kit, storage, expelled)
    screen.say(f"kit: {kit}, as it was on {kept.made}; jobs: {kept.storage}")
    screen.say(f"expelled: {', '.join(kept.expelled) or 'nobody'}. Who was expelled since then: --expelled NAME")
    screen.answer(kit=kit, made=kept.made, expelled=kept.expelled)


MAKE = Command(make, "provisioning/consortium.yaml -o kits", "For a consortium's lead", of="kits")
BACKUP = Command(backup, "kits/fl.example.org -o server.zip", "For a consortium's lead", of="kits")
RESTORE = Command(
    restore, "server.zip --kit /srv/fl.example.org --expelled st-anna", "For a consortium's lead", of="kits"
)
