"""The commands that look into finished runs."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.extend import Command, Screen, options, settings_of


def privacy(
    screen: Screen,
    runs: options.Runs,
    *,
    out: Annotated[
        Path,
        typer.Option(*options.OUT, metavar="FOLDER", parser=options.output_folder, help="the folder to write"),
    ],
    seed: Annotated[int, typer.Option(metavar="N", parser=options.whole, help="of the cases that are drawn")] = 0,
    device: options.Device = None,
    data: options.Data = None,
    site_config: options.SiteConfigs = None,
) -> int:
    """Test whether the models of finished runs tell who was in the training set.

    Ends with 1 where a model should not leave; docs/privacy.md says what the test can't see.
    """
    screen.note("reading the runs")
    from medsilo.extend import write_json
    from medsilo_papers.release import audit

    with screen.busy("testing the models"):
        found, lines, warns = audit(runs, settings_of(device, data, site_config), seed)
    file = out / "privacy.json"
    write_json(file, found)
    for line in [*lines, str(file)]:
        screen.say(line)
    screen.answer(files=[file], lines=lines)
    return 1 if warns else 0


PRIVACY = Command(privacy, "runs/fedavg -o audit", "Of finished runs", of="analyse")
