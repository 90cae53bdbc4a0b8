"""The command 'data', which makes and manages a hospital's data set."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medsilo.cli import options
from medsilo.cli.options import option
from medsilo.cli.show import Command, Console
from medsilo.core.errors import MedsiloError
from medsilo_lab.cli import asking

if TYPE_CHECKING:
    from medsilo.site.data_set import Difference

SHOWN = 20
OUT = "data-set"
ACTIONS = ("show", "accept", "check", "diff")


def data(
    screen: Console,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help=("the folder of images or the table to describe; or one of the words show, accept, check and diff"),
        ),
    ],
    data_set: Annotated[
        Path | None,
        typer.Argument(metavar="DATASET", help=("with show, accept, check or diff: the folder of the data set")),
    ] = None,
    *,
    out: options.OutFolderOrNone = None,
    name: Annotated[str, option("NAME", "the hospital's name in the data set")] = "hospital-a",
    target: asking.Target = None,
    said: asking.Said = None,
    answers: asking.AnswersFile = None,
    yes: asking.Yes = False,
    call: asking.Called = None,
    subgroup: asking.Subgroups = None,
    by: Annotated[str, option("PERSON", "with accept: the person who accepts the data set")] = "",
    kit: options.SiteKit = None,
    settings_folder: options.SettingsFolder = None,
) -> int:
    """Describe a hospital's folder or table as a data set, which a person reads and accepts.

    The command asks about facts that the files do not show, such as which images belong to one patient. The command
    writes data.yaml and a list of the files into the folder ./data-set or --out. The other commands need an existing
    data set. 'data show' prints it, and 'data accept' signs it with the kit's key. 'data check' verifies that the data
    still match it, and 'data diff' lists its changes since it was accepted.
    """
    if source not in ACTIONS:
        settings = options.folder_of_settings(settings_folder, kit)
        try:
            out = out or options.output_folder(OUT)
        except ValueError as error:
            return screen.fail(MedsiloError(f"data: --out: {error}"), 2)
        return _make(
            screen,
            Path(source),
            out,
            name,
            target,
            asking.answers_of(said, answers),
            yes,
            settings,
            asking.called_by(call),
            subgroup or [],
        )
    if data_set is None:
        raise MedsiloError(f"{source} needs the data set's folder: medsilo data {source} {out or OUT}")
    return {"show": _show, "accept": _accept, "check": _check, "diff": _diff}[source](screen, data_set, by, kit)


def _make(
    screen: Console,
    folder: Path,
    out: Path,
    name: str,
    target: str | None,
    said: dict[str, str],
    yes: bool,
    settings: Path | None,
    called: dict[str, str],
    subgroups: list[str],
) -> int:
    screen.note(f"looking at {folder}")
    from medsilo.core.files import write_text
    from medsilo.core.yaml_text import dump_yaml
    from medsilo.site.data_set import DataSet
    from medsilo.site.party import FILE_NAME
    from medsilo.site.settings import SiteSettings
    from medsilo_lab.start.dataset_layout import DatasetLayout
    from medsilo_lab.start.making import PAGE, make_each
    from medsilo_lab.start.subgroups import AskedSubgroup

    if not folder.exists():
        raise MedsiloError(f"{folder} does not exist; give the folder or the table of your data")
    if out.resolve().is_relative_to(folder.resolve()):
        raise MedsiloError(
            f"--out {out} lies in the data folder, where medsilo writes nothing; give a folder elsewhere"
        )
    name = asking.hospital_called(screen, name)
    floor = (SiteSettings.read(settings) if settings else SiteSettings()).least(synthetic=False)
    layout = DatasetLayout(folder.resolve(), name, target=target, said={"alone": True})
    ask, progress = asking.asker(screen, yes), asking.progress_on(screen)
    asked = [AskedSubgroup.parse(text) for text in subgroups]
    found = make_each(layout, ask, out, said, progress, floor, called=called, subgroups=asked).sets
    for site, made in found.items():
        made.write(out / site)
    sets = [made.data_set for made in found.values()]
    screen.say(*sets[0].found)
    for site, made in found.items():
        place, page = (out / site / name for name in (DataSet.FILE, PAGE))
        own = [*([f"{site}:"] if site else []), *asking.lines_of(made.data_set), ""]
        screen.say(*own, f"data set: {place}", f"page: {page}")
        if site:
            write_text(out / site / FILE_NAME, dump_yaml({"data": str((out / site).resolve())}))
    screen.say(f"read {'it' if len(sets) == 1 else 'each'}, then accept it: medsilo data accept {out} --by 'A. PERSON'")
    screen.answer(
        data_set=sets[0].model_dump(mode="json"), identity=sets[0].identity, hospitals=[site for site in found if site]
    )
    return 0


def _show(screen: Console, folder: Path, by: str, kit: Path | None) -> int:
    from medsilo.core.yaml_text import dump_yaml
    from medsilo.site.data_set import DataSet

    own = DataSet.read(folder)
    screen.say(dump_yaml(own.model_dump(mode="json", exclude_defaults=True)).rstrip(), f"identity: {own.identity}")
    screen.answer(data_set=own.model_dump(mode="json"), identity=own.identity)
    return 0


def _key(kit: Path | None) -> "object | None":
    if kit is None:
        return None
    from medsilo.check.hospital_checks import KitAtHome

    return KitAtHome.read(kit).files.key_for("data set")


def _accept(screen: Console, place: Path, by: str, kit: Path | None) -> int:
    from medsilo.site.data_set import DataSet, accept

    if not (place / DataSet.FILE).exists() and (each := sorted(place.glob(f"*/{DataSet.FILE}"))):
        # on a researcher's machine, the folder may contain the data sets of several hospitals
        return max(_accept(screen, own.parent, by, kit) for own in each)

    if not by:
        raise MedsiloError("name the person who accepts this data set: --by 'A. PERSON'")
    changed = _changed(place)
    if changed:
        raise MedsiloError(
            f"the data folder has changed since the data set was made: {changed}; make the data set again"
        )
    own = DataSet.read(place)
    given = accept(place, by, _key(kit))
    screen.say(*asking.lines_of(own), "", f"accepted by {given.by}: {given.identity[:12]}")
    screen.say(f"in this hospital's medsilo.yaml: data: {place.resolve()}")
    screen.answer(identity=given.identity, by=given.by)
    return 0


def _changed(folder: Path) -> "Difference":
    from medsilo.site.data_set import DataSet, compared, files_of, read_inventory, scan

    known = read_inventory(folder)
    return compared(known, scan(files_of(DataSet.read(folder).source(folder)), known))


def _check(screen: Console, folder: Path, by: str, kit: Path | None) -> int:
    from medsilo.site.data_set import check_accepted

    changed = _changed(folder)
    screen.say(f"files: {changed}")
    _say_files(screen, changed)
    given = check_accepted(folder, _key(kit))
    screen.say(f"accepted by {given.by}: {given.identity[:12]}")
    screen.answer(files=str(changed), accepted=given.by)
    return 1 if changed else 0


def _diff(screen: Console, folder: Path, by: str, kit: Path | None) -> int:
    from medsilo.site.data_set import DataSet, as_accepted, compared, files_of, scan

    given, before, known = as_accepted(folder, _key(kit))
    now = DataSet.read(folder)
    files = compared(known, scan(files_of(now.source(folder)), known))
    said = now.changes_since(before)
    screen.say(f"since {given.by} accepted {given.identity[:12]}: {files if files or said else 'nothing changed'}")
    _say_files(screen, files)
    screen.say(*(f"  {line}" for line in said))
    names = {"new": files.new, "gone": files.gone, "changed": files.changed}
    screen.answer(accepted=given.by, files={word: list(name) for word, name in names.items()}, data_set=said)
    return 1 if files or said else 0


def _say_files(screen: Console, changed: "Difference") -> None:
    for word, names in (("new", changed.new), ("gone", changed.gone), ("changed", changed.changed)):
        more = [f"  and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
        screen.say(*(f"  {word}: {name}" for name in names[:SHOWN]), *more)


DATA = Command(data, "/data/kidney -o kidney-2026", "To begin with")
