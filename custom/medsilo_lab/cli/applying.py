"""The command that puts a trained model to use: predict."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.cli import options
from medsilo.cli.options import option, several
from medsilo.cli.show import Command, Console


def predict(
    screen: Console,
    model: options.Model,
    images: Annotated[
        list[Path], typer.Argument(help="images, DICOM folders, or folders with such; tables; or recordings")
    ],
    *,
    out: options.OutFolder,
    site: options.ModelOf = "",
    others: Annotated[
        list[Path],
        several("MODEL", "a further model of the same task, for an ensemble; may be repeated", "--with"),
    ],
    device: Annotated[str, option("DEVICE", options.DEVICES)] = "auto",
    site_config: options.SiteConfig = None,
) -> int:
    """Predict masks or classes for images or recordings, or the target of each line of a table.

    For images it writes a mask on each image's own grid, predictions.csv and .json, and overview.png with outlines in
    the first images. For tables and recordings it writes predictions.csv and .json, with a row for each line or window.
    recordings.csv has a row for each recording. A model of dicom-folder writes a DICOM segmentation and a structured
    report for each series. With several models the mean of their probabilities decides. Ends with 1 if any image,
    line or recording failed.
    """
    screen.note("reading the model")
    from medsilo.site.settings import make_settings
    from medsilo_lab.deploy.predictor import asked_to_predict

    settings, data = make_settings({"device": device}, "the command line"), Command.settings(site_config).data
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
    """Say how well the model did on its test cases, where its run is here: a poor one answers like a good one."""
    from medsilo.runs import paths
    from medsilo.runs.reading import read_summary

    if run is None or not (run / paths.SUMMARY).is_file():
        return
    summary = read_summary(run)
    score = summary.score(site) if site else summary.pooled_test
    if score is not None:
        screen.say(f"this model's test score: {score:.2f} ({summary.metric})")


PREDICT = Command(predict, "supermodel scan.nii.gz folder-of-scans/ -o predictions", "For a hospital's engineer")
