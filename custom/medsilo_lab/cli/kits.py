"""Commands that make a consortium's startup kits, and back up or restore its server."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.cli import options
from medsilo.cli.options import option, several
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError


def make(
    screen: Console,
    consortium: Annotated[
        Path, typer.Argument(help=("the consortium's description, such as provisioning/consortium.yaml"))
    ],
    *,
    out: options.OutFolder,
    renew: Annotated[list[str], several("NAME", "give NAME a new certificate, for the same key")],
    new_key: Annotated[bool, typer.Option("--new-key", help="with --renew: make a new key, too")] = False,
    requests: Annotated[
        bool,
        typer.Option(
            "--requests",
            help=("instead of kits, make the files with which each party creates its own key and certificate request"),
        ),
    ] = False,
) -> None:
    """Make signed startup kits for a consortium, or for its new members.

    Existing kits stay unchanged, except with --renew. 'medsilo docs provisioning' lists the owner of each kit and the
    files to keep safe.
    """
    from medsilo_lab.consortium.description import read_consortium
    from medsilo_lab.consortium.provision import provision, write_requests

    described = read_consortium(consortium)
    if requests:
        write_requests(described, out)
        screen.say(f"requests: {out}; 'medsilo docs provisioning' says how each party goes on")
        screen.answer(requests=out)
        return
    if new_key and not renew:
        raise MedsiloError("--new-key needs --renew NAME, the party that gets a new key")
    new = provision(described, out, renew, new_key)
    screen.say(*(f"kit: {out / name}" for name in new))
    screen.say(f"new kits: {len(new)}; the others are as they were. Keep {out / 'private-root'} to yourself")
    screen.answer(kits=[out / name for name in new])


def revoke(
    screen: Console,
    names: Annotated[list[str], typer.Argument(help="parties whose keys may be compromised")],
    *,
    kits: Annotated[Path, option("FOLDER", "the folder that 'medsilo kits make' wrote, with private-root/")],
) -> None:
    """Write a signed certificate revocation list after a startup kit was lost or stolen.

    Copy revoked.pem into the kits of the server and of each relay, even while they run. Server and relays then close
    the connections of the revoked certificates and reject new connections with them. Hospitals receive the list from
    the server. Then give the party a kit with a new key: 'medsilo kits make --renew NAME --new-key'.
    """
    from medsilo_lab.consortium.provision import revoke as write_list

    written = write_list(kits, names)
    screen.say(f"list: {written}; copy it into the kits of the server and of each relay, beside startup/")
    screen.say(f"then: medsilo kits make CONSORTIUM -o {kits} --renew {names[0]} --new-key")
    screen.answer(list=written)


def backup(
    screen: Console, kit: Annotated[Path, typer.Argument(help="the server's startup kit")], *, out: options.OutFile
) -> None:
    """Write everything that a server needs for a restart into one file. The backup works while the server runs.

    The file contains the server's kit with its studies, the list of expelled hospitals, and the jobs in server.storage.
    The file also contains the server's private key, so encrypt it and store it on another machine.
    """
    from medsilo_lab.consortium.backup import back_up

    screen.note(f"reading {kit}")
    kept = back_up(kit, out)
    screen.say(f"backup: {out}, {kept.files} files; expelled: {', '.join(kept.expelled) or 'nobody'}")
    screen.answer(backup=out, files=kept.files, expelled=kept.expelled)


def restore(
    screen: Console,
    file: Annotated[Path, typer.Argument(help="the file that 'medsilo kits backup' wrote")],
    *,
    kit: Annotated[Path, option("KIT", "new folder for the server's kit")],
    storage: Annotated[
        Path | None, option("FOLDER", "new folder for the server's jobs (default: storage/ in the kit)")
    ] = None,
    expelled: Annotated[list[str], several("NAME", "a hospital that you expelled after the backup; may be repeated")],
) -> None:
    """Restore a server's kit and its jobs from a backup.

    The command writes only into the given folders, and overwrites nothing.
    """
    from medsilo_lab.consortium.backup import put_back

    screen.note(f"reading {file}")
    kept = put_back(file, kit, storage, expelled)
    screen.say(f"kit: {kit}, as it was on {kept.made}; jobs: {kept.storage}")
    screen.say(f"expelled: {', '.join(kept.expelled) or 'nobody'}. Who was expelled since then: --expelled NAME")
    screen.answer(kit=kit, made=kept.made, expelled=kept.expelled)


MAKE = Command(make, "provisioning/consortium.yaml -o kits", "For a consortium's lead", of="kits")
REVOKE = Command(revoke, "st-anna --kits kits", "For a consortium's lead", of="kits")
BACKUP = Command(backup, "kits/fl.example.org -o server.zip", "For a consortium's lead", of="kits")
RESTORE = Command(
    restore, "server.zip --kit /srv/fl.example.org --expelled st-anna", "For a consortium's lead", of="kits"
)
