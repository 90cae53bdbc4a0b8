"""Hand a model on: sign it, test it on patients of another hospital, or export it."""

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
OWN = "releases"  # what the key signs
Key = Annotated[Path, typer.Option(metavar="FILE", help="the signing key; made at its first use")]
Leads = Annotated[
    list[str],
    typer.Option(
        "--lead",
        metavar="FINGERPRINT",
        help="fingerprint of the signing key, which the lead gave you separately; may be repeated",
    ),
]


def make(
    screen: Console,
    runs: Annotated[list[Path], typer.Argument(help="a run's folder; several make an ensemble")],
    *,
    out: options.OutFolder = Path("release"),
    site: Annotated[str, typer.Option(metavar="HOSPITAL", help="the hospital whose personal model to release")] = "",
    key: Key = KEY,
) -> int:
    """Make a signed folder of a run's model, which any hospital tests on its own patients by `medsilo release test`.

    It holds the model, its plan and its card, with the scores that hospitals disclosed. Give the hospitals the
    fingerprint of your key by another way than the folder.
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
    releases: Annotated[list[Path], typer.Argument(help="a release; two are compared on the same patients")],
    *,
    data: options.Data = None,
    site_config: options.SiteConfig = None,
    hospital: Annotated[str, typer.Option("--as", metavar="NAME", help="this hospital's name")],
    out: options.OutFolder = Path("validation"),
    leads: Leads,
    device: options.Device = None,
) -> int:
    """Test a released model on this hospital's own patients: no kit, no network and no account are needed.

    All cases are tested. The page, with its pictures, stays here. The last line has the score and the cases in this
    hospital's own steps (medsilo.yaml, --settings). That line may be mailed to the lead.
    """
    screen.begin(f"reading {', '.join(map(str, releases))}")
    from medsilo_lab.release.release_folder import Release
    from medsilo_lab.release.release_pages import remove_earlier, write_validation
    from medsilo_lab.study import external_test

    if not is_safe_name(hospital):
        raise MedsiloError("--as: give letters, digits, '.', '_' and '-', at most 63")
    if len(releases) > MOST_COMPARED:
        raise MedsiloError(f"{len(releases)} releases; give one, or two to compare")
    opened = [Release.open(folder, leads) for folder in releases]
    settings = options.settings_of(device, data, site_config, pictures=True)
    remove_earlier(out, hospital)
    with screen.busy("testing"):
        sources = [release.source(settings.packages) for release in opened]
        found = external_test.judged(sources, hospital, settings, out, f"release {opened[0].hash[:12]}")
    page = write_validation(opened, found, hospital, out)
    screen.say(f"page, which stays here: {page}")
    told = [
        {"release": release.hash, "score": here.reported["test"], "cases": here.reported["cases"]}
        for release, here in zip(opened, found, strict=True)
    ]
    for release, own in zip(opened, told, strict=True):
        score = "no score (too few patients)" if own["score"] is None else f"{release.manifest.metric} {own['score']:g}"
        cases = "few" if own["cases"] is None else own["cases"]
        screen.say(f"may be mailed to the lead: release {release.hash[:12]}: {score}, {cases} cases")
    screen.answer(page=page, told=told)
    return 0


def form_of(value: object) -> str:
    """Return a form in which models are exported; those of one task alone have a dot in their name."""
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
            "monai; nnunet, the form of task nnunet, is a model folder for nnUNetv2_predict_from_modelfolder",
            parser=form_of,
        ),
    ] = "monai",
) -> None:
    """Write a run's model or super model as a MONAI Bundle.

    docs/after/use-a-model.md says how MONAI runs it, and docs/research/nnunet.md how nnU-Net runs its own form.
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
