"""The command that writes, compares and verifies records of processing: record."""

from pathlib import Path
from typing import Annotated

import typer

from medsilo.cli import options
from medsilo.cli.show import Command, Screen
from medsilo.core.errors import MedsiloError


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
        from medsilo_record import filing

        count = filing.verify(verify, key)
        screen.say(f"{count} files are as this hospital signed them")
        screen.answer(files=count)
        return 0
    if plan is None or not (out or compare):
        raise MedsiloError("give a plan, and -o FOLDER for its record or --compare OLD; or --verify FOLDER")
    screen.note("reading the plan")
    from medsilo_record.comparing import Filed, differences
    from medsilo_record.facts import record_of
    from medsilo_record.filing import case_of, files_in, old_record, write_signed

    case, signer = case_of(plan, changes, local, kit, site)
    entries = record_of(case)
    filed, said = Filed.of(case, entries), []
    if compare:
        said = list(differences(filed, old_record(case, compare)))
        screen.say("\n".join(said) or "nothing changed")
    if out:
        with screen.busy("writing"):
            files = files_in(case, entries, filed, run)
        fingerprint = write_signed(out, files, signer)
        screen.say(f"record: {out / 'record.html'}\nsigned by the key {fingerprint}")
        screen.answer(folder=out, files=sorted(files), key=fingerprint)
    screen.answer(changes=said, plan=case.plan.hash)
    return 0


def write_on_page(kit: Path, plan: str) -> dict[str, bytes]:
    """Write the record for your data protection officer.

    What is processed, what leaves, bounded how and tested by what, with blanks for what only you know, signed by this
    kit. It reads your data for two numbers, and sends nothing.
    """
    from medsilo_record.filing import on_page

    return on_page(kit, plan)


RECORD = Command(record, "jobs/fedavg --settings local -o record", "For a hospital's engineer")
