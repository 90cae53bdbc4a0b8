"""The command that looks into finished runs: analyse."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.extend import Command, Screen, options, settings_of
from medsilo_papers import KINDS


def analyse(
    screen: Screen,
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            parser=options.one_of(KINDS),
            autocompletion=lambda: list(KINDS),
            help=", ".join(KINDS),
        ),
    ],
    runs: options.Runs,
    *,
    out: Annotated[
        Path,
        typer.Option(*options.OUT, metavar="FOLDER", parser=options.output_folder, help="the folder to write"),
    ],
    seed: Annotated[int, typer.Option(metavar="N", parser=options.whole, help="of directions, maps and attacks")] = 0,
    cases: Annotated[
        int | None,
        typer.Option(metavar="N", parser=options.positive, help="so many of each site (default: by kind)"),
    ] = None,
    reach: Annotated[
        float,
        typer.Option(metavar="LENGTH", parser=options.length, help="landscape, profile: how far they go, in lengths"),
    ] = 1.0,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=options.positive,
            help="landscape, profile: from the centre to the edge (default: 10)",
        ),
    ] = None,
    iterations: Annotated[
        int, typer.Option(metavar="N", parser=options.positive, help="inversion: steps of the attacker")
    ] = 300,
    network: Annotated[
        str | None,
        typer.Option(metavar="NETWORK", help="drift, tsne: one of the method's networks, e.g. selector"),
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="inversion: draw images that are not synthetic, too")
    ] = False,
    device: options.Device = None,
    data: options.Data = None,
    site_config: options.SiteConfigs = None,
) -> int:
    """Draw a figure of the papers from finished runs, with its data; or attack their privacy.

    docs/analyses.md says what each shows and how it is read. privacy: do the models tell who was in the training set?
    Ends with 1 where a model should not leave; docs/privacy.md says what the test can't see.
    """
    screen.note("reading the runs")
    from medsilo_papers import analysis

    settings = settings_of(device, data, site_config, pictures=pictures)
    asked = analysis.Question(settings, seed, cases, reach, steps, iterations, network)
    with screen.busy(f"working out {kind}"):
        files, found = analysis.analyse(kind, runs, asked, out)
    for line in [*found.lines, *map(str, files)]:
        screen.say(line)
    screen.answer(files=files, lines=list(found.lines))
    return 1 if found.warns else 0


ANALYSE = Command(analyse, "landscape runs/fedavg runs/harmofl -o figures", "Of finished runs")
