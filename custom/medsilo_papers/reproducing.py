"""The command that runs published tables again: reproduce."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from medsilo.extend import Command, Screen, options

TABLES = ("flamby",)
PUBLISHED_SEEDS = options.Seeds((42, 43, 44, 45, 46))


def reproduce(
    screen: Screen,
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE",
            parser=options.one_of(TABLES),
            autocompletion=lambda: list(TABLES),
            help=f"whose published table: {', '.join(TABLES)}",
        ),
    ],
    *,
    data: Annotated[
        Path, typer.Option(metavar="FOLDER", help="where the sets' own folders lie; nothing is downloaded")
    ] = Path("data"),
    seeds: Annotated[
        options.Seeds, typer.Option(metavar="N,N,N", parser=options.seeds, help="the published ones by default")
    ] = PUBLISHED_SEEDS,
) -> int:
    """Run a published table again, and hold each cell against it.

    A cell agrees where the means over seeds are within two standard errors of their difference. Ends with 1 where one
    does not. Takes minutes.
    """
    screen.note(f"reading the files of {table}")
    from medsilo_papers.flamby import HEADS, compare

    cells = []
    with screen.busy("training"):
        for cell in compare(data, seeds.numbers, screen.say):
            cells.append(cell)
            screen.note(f"{cell.set}, {cell.method} on {cell.test}: done")
    rows = [cell.row() for cell in cells]
    widths = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (HEADS, *rows)]
    screen.table(HEADS, rows, lines)
    agree = sum(cell.agrees for cell in cells)
    screen.say(f"{agree} of {len(cells)} cells are within two standard errors")
    screen.answer(cells=[{**asdict(cell), "agrees": cell.agrees} for cell in cells], agree=agree)
    return 0 if agree == len(cells) else 1


REPRODUCE = Command(reproduce, "flamby --data DATA", "With all data on one machine")
