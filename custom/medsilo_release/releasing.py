"""The commands after a study: release, validate, receipts merge."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.cli import options
from medsilo.cli.show import Command, Screen
from medsilo.core.errors import MedsiloError

if TYPE_CHECKING:
    from medsilo_release.leaving import Departure

KEY = Path("~/.config/medsilo/signing.pem")
MOST_COMPARED = 2
OWN = "releases and receipts"  # what the key signs
Key = Annotated[Path, typer.Option(metavar="FILE", help="the key that signs; one is made where there is none")]
Leads = Annotated[
    list[str],
    typer.Option(
        "--lead",
        metavar="FINGERPRINT",
        help="of the key that signed a release, as its lead told you by another way than the folder; may be repeated",
    ),
]


def release(
    screen: Screen,
    runs: Annotated[list[Path], typer.Argument(help="a run's folder; of several the models answer together")],
    *,
    out: options.OutFolder = Path("release"),
    site: Annotated[str, typer.Option(metavar="HOSPITAL", help="whose own model, where each has one")] = "",
    after: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="the release whose place it takes; says what changed")
    ] = None,
    conditions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="what later versions may change, and what has to hold"),
    ] = None,
    key: Key = KEY,
) -> int:
    """Make a signed folder of a run's model, which any hospital tests on its own patients by `medsilo validate`.

    It holds the model, its plan and its card, with the scores that hospitals told. Tell the hospitals the fingerprint
    of your key by another way than the folder.
    """
    from medsilo.sealing import signed, signing
    from medsilo_release.release_folder import Conditions, Release, write_release

    with screen.busy("releasing"):
        old = Release.open(after) if after else None
        agreed = Conditions.in_file(conditions, "--conditions", "give YAML") if conditions else None
        made = write_release(runs, site, out, signing.own_key(key.expanduser(), OWN), old, agreed)
    lead = signed.fingerprint(made.lead)
    screen.say(f"release: {out}\nsigned by {lead}; at a hospital: medsilo validate {out} --data DATA --lead {lead}")
    screen.answer(release=out, hash=made.hash, key=lead)
    return 0


def validate(
    screen: Screen,
    releases: Annotated[list[Path], typer.Argument(help="a release; two are compared on the same patients")],
    *,
    data: options.Data = None,
    site_config: options.SiteConfig = None,
    hospital: Annotated[str, typer.Option("--as", metavar="NAME", help="this hospital's name")],
    out: options.OutFolder = Path("validation"),
    leads: Leads,
    watch: Annotated[
        bool, typer.Option("--watch", help="keep sums of later predictions, to notice changes against these cases")
    ] = False,
    device: options.Device = None,
    key: Key = KEY,
) -> int:
    """Test a released model on this hospital's own patients: no kit, no network and no account are needed.

    All cases are tested. The page, with its pictures, stays here. The receipt tells the score in this hospital's own
    steps (medsilo.yaml, --settings), is signed with a key of this hospital, and goes to the lead by mail.
    """
    screen.begin(f"reading {', '.join(map(str, releases))}")
    from medsilo.sealing import signed, signing
    from medsilo.study import judging
    from medsilo_release.patient_sums import Validated, WatchFolder
    from medsilo_release.receipts import NAME, receipt_path, write_receipt
    from medsilo_release.release_folder import Release
    from medsilo_release.release_pages import write_validation

    if not re.fullmatch(NAME, hospital):
        raise MedsiloError("--as: give letters, digits, '.', '_' and '-', at most 63")
    if len(releases) > MOST_COMPARED:
        raise MedsiloError(f"{len(releases)} releases; give one, or two to compare")
    opened = [Release.open(folder, leads) for folder in releases]
    settings = options.settings_of(device, data, site_config, pictures=True)
    if watch and settings.data and settings.data.inside.label:
        raise MedsiloError(
            "--watch: these recordings are cut where their labels change, and others will not be; name labels by "
            "folders or a table"
        )
    with screen.busy("testing"):
        looks = [Validated() for _ in opened]
        sources = [release.source(settings.packages) for release in opened]
        needed = [look if watch or source.plan.asking else None for look, source in zip(looks, sources, strict=True)]
        found = judging.judged(sources, hospital, settings, out, f"release {opened[0].hash[:12]}", needed)
    page = write_validation(opened, found, hospital, out, [look.kept for look in looks])
    own = signing.own_key(key.expanduser(), OWN)
    receipts = []
    for release, here, look in zip(opened, found, looks, strict=True):
        held, path = None if look.kept is None else here.mean(look.kept), receipt_path(release, hospital, out)
        told = {"score": here.told["test"], "cases": here.told["cases"], "kept": held}
        receipts.append(write_receipt(release, hospital, path, own, **told))
        if watch:
            begun = look.reference(here.test.metric, hospital, here.test.measures, here.patients)
            WatchFolder(release.hash).begin(begun)
            kept = "'medsilo predict' keeps sums of its cases here, and 'medsilo monitor' shows"
            screen.say(f"watched: {release.folder}; {kept}")
    screen.say(f"page, which stays here: {page}")
    for receipt in receipts:
        screen.say(f"receipt, for the lead: {receipt}")
    screen.answer(page=page, receipts=receipts, key=signed.fingerprint(signing.public_text(own)))
    return 0


def monitor(
    screen: Screen,
    release: Annotated[Path, typer.Argument(help="a release that was validated with --watch")],
    *,
    outcomes: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE", help="predictions.csv with a column 'outcome', or 'score', of cases that are known"
        ),
    ] = None,
    site_config: options.SiteConfig = None,
    out: options.OutFile = Path("monitor.html"),
    key: Key = KEY,
) -> int:
    """Show whether the cases of a released model have changed since its validation, and write receipts of past months.

    All of it is at this hospital: sums that 'medsilo predict' kept. Together the charts give one false alarm a year.
    Ends with 1 where there was an alarm.
    """
    from medsilo.sealing import signing
    from medsilo_release.monitoring import Watched, receipt_of, take_outcomes, write_monitor
    from medsilo_release.patient_sums import this_month
    from medsilo_release.release_folder import Release

    opened = Release.open(release)
    if outcomes:
        screen.say(f"{take_outcomes(opened, outcomes)} outcomes")
    with screen.busy("drawing years"):
        watched = Watched.read(opened)
    page = write_monitor(watched, out)
    settings, own = options.settings_of(None, None, site_config), signing.own_key(key.expanduser(), OWN)
    over = [month for month in watched.months if month < this_month()]
    receipts = [receipt_of(watched, month, settings, own) for month in over]
    alarms = [alarm.name for alarm in (*watched.alarms, *watched.wrong)]
    screen.say(f"{len(alarms)} alarms\npage, which stays here: {page}")
    for receipt in receipts:
        screen.say(f"receipt, for the lead: {receipt}")
    screen.answer(page=page, alarms=alarms, receipts=receipts)
    return 1 if alarms else 0


def merge(
    screen: Screen,
    receipts: Annotated[list[Path], typer.Argument(help="the hospitals' receipts")],
    *,
    of: Annotated[Path, typer.Option("--release", metavar="FOLDER", help="the release that they are of")],
    out: options.OutFile = Path("receipts.html"),
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="lines 'hospital fingerprint'; receipts of other keys don't count"),
    ] = None,
) -> int:
    """Put the receipts of a release on one page: hospitals side by side, and which receipts do not count, and why."""
    from medsilo_release.receipts import known_keys, merged
    from medsilo_release.release_folder import Release
    from medsilo_release.release_pages import write_merged

    release = Release.open(of)
    found = merged(release, receipts, known_keys(keys) if keys else None)
    page = write_merged(release, found, out)
    for name, why in sorted(found.refused.items()):
        screen.say(f"does not count: {name}: {why}")
    screen.say(f"page: {page}")
    screen.answer(page=page, hospitals=sorted(found.receipts), refused=found.refused)
    return 1 if found.refused else 0


def leave(
    screen: Screen,
    study: Annotated[Path, typer.Argument(help="the finished run's folder")],
    hospital: Annotated[str, typer.Argument(help="who leaves, or whose patients leave")],
    *,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="RUN", help="the new run; one that is finished is certified alone")
    ],
    patients: Annotated[
        bool, typer.Option("--patients", help="the hospital stays; patients under its data.leave_out leave")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="agree to the price; without it, it is only said")] = False,
    kit: Annotated[
        Path | None,
        typer.Option(metavar="KIT", help="submit it in the consortium; fetch it, and certify it then"),
    ] = None,
    data: options.DataOfRun = None,
    site_config: options.SiteConfigs = None,
    device: options.DeviceOfRun = None,
    key: Key = KEY,
) -> int:
    """Make a study as if a hospital, or some of its patients, had never joined: same plan, same seeds, without it.

    It goes on from the last round before the hospital came, if that is kept; else it is the whole study again. Writes
    a signed certificate with the hashes of plan, rounds and models, and lists the copies of the old models.
    """
    from medsilo.sealing import signing
    from medsilo.study import judging
    from medsilo_release.leaving import CERTIFICATE, Departure, certify

    gone = Departure.of(study, hospital, patients)
    if not (out / "summary.json").exists():
        screen.say(gone.price(anew=bool(kit)))
        if not yes:
            raise MedsiloError("nothing was done yet; give --yes to agree to this price")
        if kit:
            return _submit(screen, gone, kit, out.name)
        with screen.busy("running the study again"):
            gone.run(out, options.settings_of(device, data, site_config, judging.run_settings(study)))
    told = certify(gone, out, signing.own_key(key.expanduser(), OWN))
    screen.say(f"certificate: {out / CERTIFICATE}\ncopies of the old models, which are for you to remove:")
    for copy in told.copies:
        screen.say(f"  {copy}")
    screen.answer(certificate=out / CERTIFICATE, copies=list(told.copies), begun_after=told.begun_after)
    return 0


def _submit(screen: Screen, gone: "Departure", kit: Path, name: str) -> int:
    from tempfile import TemporaryDirectory

    from medsilo.consortium import lead
    from medsilo.flare.jobs import write_job

    with TemporaryDirectory() as place:
        write_job(Path(place) / "job", gone.plan, study=name)
        job = lead.submit(Path(place) / "job", kit, screen.say)
    screen.say(f"{job}\nwhen it has ended, fetch it, and certify it: medsilo leave … -o RUN")
    screen.answer(job=job)
    return 0


ENGINEER, LEAD = "For a hospital's engineer", "For a consortium's lead"
RELEASE = Command(release, "runs/study -o release", LEAD)
VALIDATE = Command(validate, "release --as st-anna --data /data/prostate --lead FINGERPRINT", ENGINEER)
LEAVE = Command(leave, "runs/study st-anna -o runs/without --yes", LEAD)
MONITOR = Command(monitor, "release --outcomes known.csv", ENGINEER)
MERGE = Command(merge, "*.receipt --release release", LEAD, of="receipts")
