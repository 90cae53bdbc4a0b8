"""The command that brings DICOM objects into a hospital's folder: receive."""

import re
from pathlib import Path
from threading import Event
from typing import Annotated

import typer

from medsilo.extend import Command, MedsiloError, Screen


def ae_title(text: str) -> str:
    """Return a node's title; raises ValueError."""
    from medsilo_dicom.node import TITLE

    if not re.fullmatch(TITLE, text):
        raise ValueError(f"{text!r} is no AE title: it has 1 to 16 letters and digits")
    return text


def receive(
    screen: Screen,
    folder: Annotated[Path, typer.Argument(help="where the objects are kept, for task dicom-folder")],
    *,
    allow: Annotated[
        list[str],
        typer.Option(
            metavar="TITLE",
            parser=ae_title,
            default_factory=list,
            show_default=False,
            help="an AE title that may send",
        ),
    ],
    title: Annotated[str, typer.Option(metavar="TITLE", parser=ae_title, help="the AE title of this node")] = "MEDSILO",
    port: Annotated[int, typer.Option(metavar="PORT", min=1, max=65_535, help="where this node listens")] = 11112,
    address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="the address it listens on; without it this machine alone can send")
    ] = "127.0.0.1",
    quota: Annotated[int, typer.Option(metavar="GIB", min=1, help="GiB that the folder takes")] = 100,
    largest: Annotated[int, typer.Option(metavar="MIB", min=1, help="MiB of one object")] = 256,
    source: Annotated[
        str | None, typer.Option("--from", metavar="NODE", help="fetch from this node, TITLE@HOST:PORT")
    ] = None,
    studies: Annotated[
        Path | None, typer.Option(metavar="FILE", help="with --from: a list of StudyInstanceUIDs, one in each line")
    ] = None,
) -> int:
    """Receive DICOM images, segmentations and contours from other nodes until Ctrl-C, or fetch studies.

    A node listens on this machine only, unless --address says otherwise, and to the titles of --allow only. With
    --from it ends when all is there, and with 1 if nothing was kept or anything was refused.
    """
    from medsilo_dicom.node import Inbox, Node, listed_in, retrieve

    asked = listed_in(studies) if studies else []
    inbox = Inbox(folder, quota << 30, largest << 20, frozenset(asked))
    if source:
        if allow or not asked:
            raise MedsiloError("--from fetches the studies of --studies, and no node may send then; leave --allow out")
        with screen.busy("fetching"):
            retrieve(source, asked, Node(inbox, [], address, port, title, screen.say))
        screen.answer(folder=folder, kept=inbox.kept, refused=inbox.refused)
        return 1 if inbox.refused or not inbox.kept else 0
    if asked:
        raise MedsiloError("--studies needs --from: a node that listens takes what is sent")

    with Node(inbox, allow, address, port, title, screen.say) as node:
        screen.say(f"listening on {node.address} port {node.port} as {title}; Ctrl-C ends it")
        try:
            Event().wait()
        except KeyboardInterrupt:
            others = f", {node.passed_over} of other kinds passed over" if node.passed_over else ""
            screen.say(f"stopped: {inbox.kept} objects kept, {inbox.refused} refused{others}")
    screen.answer(folder=folder, kept=inbox.kept, refused=inbox.refused)
    return 0


RECEIVE = Command(receive, "/data/received --allow PACS --port 11112", "For a hospital's engineer")
