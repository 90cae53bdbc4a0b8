"""The command that writes, compares and verifies records of processing: record."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.extend import Command, MedsiloError, PageAction, Screen, options

OWN_KEY = "record.key"  # beside the medsilo.yaml of a hospital without a kit

if TYPE_CHECKING:
    from medsilo.extend import Plan, SiteSettings, Survey, signing
    from medsilo_record.comparing import Filed
    from medsilo_record.facts import Case, Part


def record(
    screen: Screen,
    plan: Annotated[
        str | None,
        typer.Argument(metavar="PLAN", help="a job, a plan's file, or a hash that asked"),
    ] = None,
    *,
    changes: options.Changes,
    local: options.SiteConfig = None,
    kit: options.SiteKit = None,
    site: Annotated[str, typer.Option(metavar="SITE", help="with --settings: this hospital's name in the plan")] = "",
    out: options.OutFolderOrNone = None,
    run: Annotated[
        Path | None, typer.Option(metavar="RUN", help="a finished run of the plan: hashes of its rounds")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="OLD", help="say what changed since an earlier record, or since another plan")
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="say whether a record is as its hospital signed it")
    ] = None,
    key: Annotated[str, typer.Option(metavar="HASH", help="with --verify: the key that the hospital named")] = "",
) -> int:
    """At a hospital: write the record of a study for a data protection officer, signed, with blanks for what is local.

    record.html and record.docx (GDPR Art. 30 and 35), record.jsonld (Data Privacy Vocabulary), model.cdx.json
    (CycloneDX), dataset.ttl (HealthDCAT-AP), outcomes.csv (DSPT, AI Act, PCCP, ISO 27001). The same plan, settings and
    data give the same bytes. Nothing is sent anywhere. docs/review.md says what each file contains.
    """
    if verify:
        return _verify(screen, verify, kit, key)
    if plan is None or not (out or compare):
        raise MedsiloError("give a plan, and -o FOLDER for its record or --compare OLD; or --verify FOLDER")
    screen.note("reading the plan")
    from medsilo_record.comparing import Filed, differences
    from medsilo_record.facts import record_of

    case, signer = _case(plan, changes, local, kit, site)
    parts = record_of(case)
    filed, said = Filed.of(case, parts), []
    if compare:
        said = list(differences(filed, _old(case, compare)))
        screen.say("\n".join(said) or "nothing changed")
    if out:
        from medsilo_record.seal import write_signed

        with screen.busy("writing"):
            files = _files(case, parts, filed, run, said if compare else None)
        fingerprint = write_signed(out, files, signer)
        screen.say(f"record: {out / 'record.html'}\nsigned by the key {fingerprint}")
        screen.answer(folder=out, files=sorted(files), key=fingerprint)
    screen.answer(changes=said, plan=case.plan.hash)
    return 0


def _on_page(kit: Path, plan: str) -> dict[str, bytes]:
    """Return all files of the record of a plan that asked, and one that has them all."""
    from tempfile import TemporaryDirectory

    from medsilo_record.comparing import Filed
    from medsilo_record.facts import record_of
    from medsilo_record.officer_pages import undated_zip
    from medsilo_record.seal import write_signed

    case, signer = _case(plan, [], None, kit, "")
    parts = record_of(case)
    with TemporaryDirectory() as place:
        write_signed(Path(place), _files(case, parts, Filed.of(case, parts), None, None), signer)
        files = {path.name: path.read_bytes() for path in sorted(Path(place).iterdir())}
    return {"record.zip": undated_zip(files), **files}


def _files(
    case: "Case", parts: "Sequence[Part]", filed: "Filed", run: Path | None, changed: list[str] | None
) -> dict[str, bytes]:
    """Return all files of a record by name, in memory, so that they are signed together."""
    from medsilo_record import bom, linked, officer_pages, outcomes

    texts = {
        "record.html": officer_pages.as_html(case, parts),
        "record.jsonld": linked.as_jsonld(case, parts),
        "model.cdx.json": bom.as_cyclonedx(case, parts, run),
        "outcomes.csv": outcomes.outcomes_csv(case.lacks),
        "record.json": filed.written(),
    }
    if changed is not None:
        texts["changes.txt"] = "\n".join(changed or ["Nothing changed."]) + "\n"
    try:
        texts["dataset.ttl"], document = linked.as_turtle(case, parts), officer_pages.as_docx(case, parts)
    except ImportError as error:
        raise MedsiloError("a record needs more packages: pip install 'medsilo[record]'") from error
    return {**{name: text.encode() for name, text in texts.items()}, "record.docx": document}


def _case(
    plan: str, changes: list[str], local: Path | None, kit: Path | None, site: str
) -> "tuple[Case, signing.PrivateKey]":
    """Return the study at this hospital, and the key that signs."""
    from medsilo.extend import (
        KitAtHome,
        files_of,
        folder_of_settings,
        key_of,
        read_policy,
        read_settings,
        signing,
        ways_around,
    )
    from medsilo_record.facts import Case

    if bool(local) == bool(kit) or (kit and site):
        raise MedsiloError("whose record? give --kit KIT, or --settings FOLDER with --site SITE")
    if kit:
        home = KitAtHome.read(kit)
        asked = [one for one in home.approvals.asked() if len(plan) >= 8 and one.hash.startswith(plan.lower())]
        study, scope = (home.plan_of(asked[0]), None) if asked else _plan(plan, changes, home.settings)
        files, last = files_of(home.kit), home.approvals.last(study.hash)
        key, policy = key_of(files), read_policy(home.local, scope)
        verdict = ", ".join([f"This plan is {last.verdict} here", *last.limits.words()]) + "." if last else ""
        case = Case(study, home.settings, policy, home.kit.name, book=home.book, kit=files, verdict=verdict)
        case = replace(case, around=tuple(what for what, _ in ways_around(home.local)))
    else:
        folder = folder_of_settings(local.parent if local and local.is_file() else local)
        assert folder
        settings = read_settings(folder)
        study, scope = _plan(plan, changes, settings)
        key = signing.own_key(folder / OWN_KEY, "this hospital's records")
        case = Case(study, settings, read_policy(folder, scope), site)
    everyone = study.participation.everyone
    if case.site and everyone and case.site not in everyone:
        raise MedsiloError(f"{case.site} is not in this plan, which names {', '.join(everyone)}")
    assert key
    return replace(case, survey=_survey(case)), key


def _plan(given: str, changes: list[str], settings: "SiteSettings") -> "tuple[Plan, str | None]":
    """Return a plan, and the privacy scope that its job asks for."""
    from medsilo.extend import find_job, load_plan, plan_of, scope_of

    if Path(given).is_file():
        return load_plan(given, changes, settings.packages), None
    job = find_job(given)
    return plan_of(job, changes, None, settings.packages), scope_of(job)


def _survey(case: "Case") -> "Survey":
    """Return the hospital's data in counts. Who is in which part is drawn separately: only sums over parts are told."""
    from medsilo.extend import SHARES, Survey, read_for

    source, sites = read_for(case.plan, case.settings.data), case.plan.participation.everyone
    if source is None or case.synthetic:
        return Survey({})
    if case.plan.task.split_by_site and source.split is None:
        source = source.model_copy(update={"split": 0, "shares": source.shares or SHARES})
    try:
        return case.plan.task.survey(case.site, sites, case.plan.seed, source)
    except MedsiloError as error:
        return Survey.stopped(str(error), error.private)


def _old(case: "Case", given: str) -> "Filed":
    """Return an earlier record, or that of another plan at this hospital."""
    from medsilo_record.comparing import FILE, Filed
    from medsilo_record.facts import record_of

    if (Path(given) / FILE).is_file():
        return Filed.read(Path(given))
    other = replace(case, plan=_plan(given, [], case.settings)[0], verdict="")
    return Filed.of(other, record_of(other))


def _verify(screen: Screen, folder: Path, kit: Path | None, key: str) -> int:
    from medsilo.extend import KitAtHome, files_of, key_of, signing
    from medsilo_record.seal import fingerprint, verify

    own = key_of(files_of(KitAtHome.read(kit).kit)) if kit else None
    count = verify(folder, fingerprint(signing.public_text(own)) if own else key)
    screen.say(f"{count} files are as this hospital signed them")
    screen.answer(files=count)
    return 0


ON_PAGE = PageAction(
    "Write the record for your data protection officer",
    "What is processed, what leaves, bounded how and tested by what, with blanks for what only you know, signed by "
    "this kit. It reads your data for two numbers, and sends nothing.",
    _on_page,
)
RECORD = Command(record, "jobs/fedavg --settings local -o record", "For a hospital's engineer")
