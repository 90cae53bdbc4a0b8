"""Say in a few lines what lies in a folder, what was chosen, and what to do next."""

from collections.abc import Sequence
from pathlib import Path

from medsilo.site.settings import FILE_NAME
from medsilo.start.choices import Draft, choose, ranges
from medsilo.start.folder_layout import layout_of_folder
from medsilo.start.looker import Folder, Looker, Sight
from medsilo.start.looks import Looks, look_at
from medsilo.start.writing import JOB, in_yaml, place_of


def found_lines(looks: Looks) -> list[str]:
    """Return what was found, one sentence a line."""
    kind, unit = ("flat images", "pixels") if looks.flat else ("volumes", "voxels")
    task = "segmentation" if looks.segments else "classification"
    cases, patients = sum(looks.cases.values()), sum(looks.patients.values())
    lines = [f"{task}: {cases} {kind} of {patients} patients ({looks.layout.kind})"]
    if looks.layout.hospitals:
        told = ", ".join(f"{site} {count}" for site, count in looks.cases.items())
        lines.append(f"{len(looks.layout.hospitals)} hospitals, each a folder: {told}")
    sizes = ranges([look.size for look in looks.looked])
    spacing = "" if looks.flat else f", {ranges([look.spacing for look in looks.looked])} mm apart"
    lines.append(f"{len(looks.looked)} {kind} were opened: {sizes} {unit}{spacing}")
    lines += [f"left out: {what} ({count})" for what, count in looks.left_out.items()]
    if looks.layout.unused:
        lines.append(f"not looked at: {', '.join(looks.layout.unused)}")
    return lines


def look(folder: Folder) -> Sight:
    """Say what suits a folder of images; a DataError says what is missing in it."""
    looks = look_at(folder.path, layout_of_folder(folder.path))
    choices = choose(looks, looks.layout.hospitals or (folder.site,), folder.machine(), folder.device)
    return Sight(found_lines(looks), bool(looks.layout.hospitals), choices)


LOOKER = Looker(look)

SHOWN = (
    "task.signals",
    "task.rate",
    "task.window",
    "task.size",
    "task.target_spacing",
    "task.intensity",
    "network.name",
    "training.batch_size",
    "data.patient",
)


def shown_lines(choices: Draft) -> list[str]:
    """Return the choices that people ask about first, one line each."""
    own = [choice for choice in (*choices.plan, *choices.settings) if choice.key in SHOWN]
    return [f"{choice.key}: {in_yaml(choice.value)}  ({choice.why})" for choice in own]


def rows(choices: Draft) -> list[tuple[str, str, str, str]]:
    """Return the choices as file, key, value and reason."""
    files = [(f"{JOB}/app/config/plan.yaml", choices.plan), (FILE_NAME, choices.settings)]
    files += [(f"{site}/{FILE_NAME}", own) for site, own in choices.sites.items()]
    return [(file, choice.key, in_yaml(choice.value), choice.why) for file, own in files for choice in own]


def advice(several: bool, out: Path, stopped: Sequence[str], minutes: int) -> list[tuple[str, str]]:
    """Return what to do next: what for, and the command, if there is one.

    several: whether the folder has all hospitals; stopped: those of which the check found what stops the study;
    minutes: of a comparison.
    """
    job = out / JOB
    given = f"--settings {out}"
    steps = [(f"read the reasons in {out / FILE_NAME} and {job}/app/config/plan.yaml, and correct what is wrong", "")]
    if stopped:
        command = f"medsilo check {job} --settings {place_of(out, stopped[0])} --site {stopped[0]}"
        return [(f"settle what the check found at {', '.join(stopped)}, then check again:", command), *steps]
    counted = f"medsilo statistics {job} {given} -o {out / 'cases'}"
    if several:
        steps.append(("how many patients each hospital has of each class, and how many an interval needs:", counted))
        command = f"medsilo compare --plan {job} --methods local,fedavg --minutes {minutes} {given} --engine inprocess"
        return [*steps, ("does joining pay for these hospitals?", command)]
    return [
        *steps,
        ("train on this machine alone:", f"medsilo run {job} --set algorithm.name=local {given} --engine inprocess"),
        (f"with others: send {job} to the consortium's lead, and put {out / FILE_NAME} into your kit's local/", ""),
    ]
