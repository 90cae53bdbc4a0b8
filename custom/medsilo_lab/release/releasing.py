"""Commands that release a model: sign it, test it on another hospital's patients, or export it."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.cli import options
from medsilo.cli.options import option
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError
from medsilo.core.text import is_safe_name

KEY = Path("~/.config/medsilo/signing.pem")
MOST_COMPARED = 2
OWN = "releases"
Key = Annotated[Path, typer.Option(metavar="FILE", help="signing key; created on first use")]
Leads = Annotated[
    list[str],
    typer.Option(
        "--lead",
        metavar="FINGERPRINT",
        help="fingerprint of the signing key, which the lead gave you by another channel; may be repeated",
    ),
]


def make(
    screen: Console,
    runs: Annotated[list[Path], typer.Argument(help="a run folder; several run folders make an ensemble")],
    *,
    out: options.OutFolder = Path("release"),
    site: Annotated[str, typer.Option(metavar="HOSPITAL", help="the hospital whose personal model is released")] = "",
    key: Key = KEY,
) -> int:
    """Make a signed release of a run's model. Any hospital can test it on its own patients with 'medsilo release test'.

    The folder contains the model, its plan, its model card and the disclosed scores. Send your key's fingerprint to the
    hospitals by another channel than the folder.
    """
    from medsilo.site import signed, signing
    from medsilo_lab.release.release_folder import write_release

    with screen.busy("releasing"):
        made = write_release(runs, site, out, signing.own_key(key.expanduser(), OWN))
    lead = signed.fingerprint(made.lead)
    test_it = f"medsilo release test {out} --as NAME --settings local --lead {lead}"
    screen.say(f"release: {out}\nsigned by {lead}; at a hospital: {test_it}")
    screen.answer(release=out, hash=made.hash, key=lead)
    return 0


def test(
    screen: Console,
    releases: Annotated[list[Path], typer.Argument(help="a release, or two releases to compare on the same patients")],
    *,
    data: options.Data = None,
    settings_folder: options.SettingsFolder = None,
    hospital: Annotated[str, typer.Option("--as", metavar="NAME", help="name of this hospital")],
    out: options.OutFolder = Path("validation"),
    leads: Leads,
    device: options.Device = None,
) -> int:
    """Test a released model on this hospital's patients. The test needs no kit, no network and no account.

    The test uses all cases of the data, not only a test part. The page with its pictures stays at the hospital. Only
    the last line of the output may be mailed to the lead. It contains the score and the number of cases, both rounded
    by this hospital's settings (medsilo.yaml, --settings).
    """
    screen.begin(f"reading {', '.join(map(str, releases))}")
    from medsilo_lab.release import external_test
    from medsilo_lab.release.release_folder import Release
    from medsilo_lab.release.release_pages import doubts, remove_earlier, write_validation

    if not is_safe_name(hospital):
        raise MedsiloError("--as: give letters, digits, '.', '_' and '-', at most 63")
    if len(releases) > MOST_COMPARED:
        raise MedsiloError(f"{len(releases)} releases were given; give one release, or two releases to compare")
    opened = [Release.open(folder, leads) for folder in releases]
    settings = options.settings_of(device, data, settings_folder, pictures=True)
    remove_earlier(out, hospital)
    with screen.busy("testing"):
        sources = [release.source(settings.packages) for release in opened]
        found = external_test.judged(sources, hospital, settings, out, f"release {opened[0].hash[:12]}")
    page = write_validation(opened, found, hospital, out)
    warnings = doubts(opened, found, hospital)
    screen.say(f"page, which stays here: {page}", *(f"warning, which stays here: {warning}" for warning in warnings))
    told = []
    for release, here in zip(opened, found, strict=True):
        own, cases = here.leaving, here.reported["cases"]
        told.append({"release": release.hash, "score": here.reported["test"], "cases": cases} | own.as_json())
        score = "no score (too few patients)" if own.kind == "suppressed" else f"{release.manifest.metric} {own}"
        over = "few" if cases is None else cases
        screen.say(f"may be mailed to the lead: release {release.hash[:12]}: {score}, {over} cases")
    screen.answer(page=page, told=told, warnings=[one.as_json() for one in warnings])
    return 0


def form_of(value: object) -> str:
    """Return the value if it names an export format, otherwise raise ValueError. If a format is only for the models of
    a single task, the name of the format contains a dot.
    """
    from medsilo_lab.deploy.exporter import EXPORTERS

    known = [name for name in EXPORTERS if "." not in name]
    if value not in known:
        raise ValueError(f"{str(value)!r} is not known; choose one of {', '.join(known)}")
    return str(value)


def export(
    screen: Console,
    model: options.Model,
    *,
    out: options.OutFolder,
    site: options.ModelOf = "",
    to: Annotated[
        str,
        option(
            "FORM",
            "monai; or nnunet, for models of the task nnunet: a model folder for nnUNetv2_predict_from_modelfolder",
            parser=form_of,
        ),
    ] = "monai",
) -> None:
    """Export a run's model or super model as a MONAI Bundle.

    'medsilo docs after/use-a-model' shows how to run the export in MONAI. 'medsilo docs research/nnunet' shows how to
    use it in nnU-Net.
    """
    screen.note("reading the model")
    from medsilo_lab.deploy.exporter import export as write
    from medsilo_lab.deploy.source import Source

    with screen.busy("writing"):
        what = write(Source.open(model, site), out, to)
    screen.say(f"{what}: {out}")
    screen.answer(folder=out)


LEAD = "For a consortium's lead"
MAKE = Command(make, "runs/study -o release", LEAD, of="release")
TEST = Command(test, "release --as st-anna --data /data/prostate --lead FINGERPRINT", LEAD, of="release")
EXPORT = Command(export, "runs/<run>/supermodel -o bundle", LEAD, of="release")
