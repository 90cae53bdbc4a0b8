"""The command 'predict', which applies a trained model to new cases."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from medsilo.cli import options
from medsilo.cli.options import option, several
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError


def predict(
    screen: Console,
    model: options.Model,
    images: Annotated[
        list[Path], typer.Argument(help="images, DICOM folders, tables or recordings; or folders that contain them")
    ],
    *,
    out: options.OutFolder,
    site: options.ModelOf = "",
    others: Annotated[
        list[Path],
        several("MODEL", "a further model of the same task, for an ensemble; may be repeated", "--with"),
    ],
    device: Annotated[str, option("DEVICE", options.DEVICES)] = "auto",
    settings_folder: options.SettingsFolder = None,
) -> int:
    """Predict masks or classes of images or recordings, or the target of each line of a table.

    For images, the output folder gets a mask on the grid of each image, predictions.csv and .json, and overview.png
    with outlines. For tables and recordings, the folder gets predictions.csv and .json, with a row for each line or
    window. For recordings, there is also recordings.csv, with a row for each recording. A model of the task
    dicom-folder writes a DICOM segmentation and a structured report for each series. Several models predict as an
    ensemble, by the mean of their probabilities. The exit code is 1 if any image, line or recording failed.
    """
    screen.note("reading the model")
    from medsilo.site.settings import make_settings
    from medsilo_lab.deploy.predictor import asked_to_predict

    settings, data = make_settings({"device": device}, "the command line"), Command.settings(settings_folder).data
    compute = settings.compute()
    predictor = asked_to_predict([model, *others], images, out, site, data, compute, screen.say)
    _say_score(screen, predictor.source.run, site)
    with screen.busy("predicting"):
        failed = predictor.predict()
    screen.say(f"predictions: {out / 'predictions.csv'}")
    screen.answer(predictions=out / "predictions.csv", details=out / "predictions.json", failed=failed)
    if failed:
        screen.warn(f"{failed} of the {predictor.cases} failed; the reasons are in {out / 'predictions.csv'}")
    return 1 if failed else 0


def _say_score(screen: Console, run: Path | None, site: str) -> None:
    from medsilo.runs import paths
    from medsilo.runs.reading import read_summary
    from medsilo_lab.report.read import read
    from medsilo_lab.report.run_warnings import learning

    if run is None or not (run / paths.SUMMARY).is_file():
        return
    summary = read_summary(run)
    score = summary.score_at(site) if site else summary.pooled_score
    if not score.known:
        return
    screen.say(f"this model's test score: {score} ({summary.metric})")
    with suppress(MedsiloError):  # if this machine lacks some files of the run, no warnings are printed
        found = read(run, whole=False)
        screen.say(*(f"warning: {one}" for one in learning({found.label: [found]}, site or None)))


PREDICT = Command(predict, "supermodel scan.nii.gz folder-of-scans/ -o predictions", "For a hospital's engineer")
