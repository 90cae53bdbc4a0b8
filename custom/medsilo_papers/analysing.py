"""Commands that look into finished runs: analyse, audit-privacy."""

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
        int,
        typer.Option(metavar="N", parser=options.positive, help="landscape, profile: from the centre to the edge"),
    ] = 10,
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
    """Draw a figure of the papers from finished runs, with its data.

    docs/analyses.md says what each shows and how it is read.
    """
    screen.note("reading the runs")
    from medsilo_papers import write
    from medsilo_papers.analysis import Question

    settings = settings_of(device, data, site_config, pictures=pictures)
    asked = Question(settings, seed, cases, reach, steps, iterations, network)
    with screen.busy(f"drawing {kind}"):
        files, lines = write.analyse(kind, runs, asked, out)
    for line in [*lines, *map(str, files)]:
        screen.say(line)
    screen.answer(files=files, lines=list(lines))
    return 0


def audit_privacy(
    screen: Screen,
    run: Annotated[Path, typer.Argument(help="the run's folder, with its sites' data on this machine")],
    *,
    trainings: Annotated[
        int, typer.Option(metavar="N", parser=options.positive, help="short trainings, half of them with the canary")
    ] = 1000,
    steps: Annotated[
        int, typer.Option(metavar="N", parser=options.positive, help="private steps of a short training")
    ] = 5,
    seed: Annotated[int, typer.Option(metavar="N", parser=options.whole, help="of who is drawn")] = 0,
    inversion: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", parser=options.output_folder, help="also try to draw images from gradients, into here"
        ),
    ] = None,
    device: options.DeviceOfRun = None,
    data: options.DataOfRun = None,
    site_config: options.SiteConfig = None,
) -> int:
    """Attack a run: does its private training keep the claim, and do its models tell who was in the training set?

    Ends with 1 where a claim is broken or a model should not leave. docs/privacy.md says what the tests can't see.
    """
    screen.note("reading the run")
    from dataclasses import asdict

    from medsilo_papers.analysis import Question, read_finished
    from medsilo_papers.privacy_audit import audit_of_run
    from medsilo_papers.release import check_release
    from medsilo_papers.write import analyse

    [finished] = read_finished([run])
    settings = settings_of(device, data, site_config)
    claim = None
    if finished.plan.privacy:
        with screen.busy("training with and without a canary"):
            claim = audit_of_run(finished, settings, trainings, seed, steps)
        screen.say(f"trainings of {claim.steps} private steps: {claim.verdict}")
    else:
        screen.say("private steps: none; the plan promises no privacy")
    with screen.busy("testing who was in the training set"):
        found = check_release(finished, settings, seed)
    for name, one in found.items():
        screen.say(f"{name}: {one.verdict}")
    files = analyse("inversion", [run], Question(settings, seed), inversion)[0] if inversion else []
    for file in files:
        screen.say(str(file))
    screen.answer(
        claim={**asdict(claim), "holds": claim.holds} if claim else None,
        models={name: {**asdict(one), "verdict": one.verdict} for name, one in found.items()},
        files=files,
    )
    return 1 if (claim and not claim.holds) or any(one.advises_against for one in found.values()) else 0


ANALYSE = Command(analyse, "landscape runs/fedavg runs/harmofl -o figures", "Of finished runs")
AUDIT = Command(audit_privacy, "runs/fedavg-synthetic-histology-20261120-120000", "For a hospital's engineer")
