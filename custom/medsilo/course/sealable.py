"""Tell how the groups of a phase are sealed, and whether they are summed in parts, as their mixers declare it."""

from medsilo.core.errors import MedsiloError
from medsilo.course.group import Group
from medsilo.course.phase import Phase
from medsilo.course.server_side import ServerSide
from medsilo.learning.loop import Compute
from medsilo.learning.training import Training
from medsilo.mixing.forms import Form, Summed, Unsealable, form_of
from medsilo.mixing.mixers import WeightedMean
from medsilo.tasks.task import Task


def forms_of(phase: Phase, sites: tuple[str, ...], task: Task, training: Training, seed: int) -> dict[str, Form]:
    """Return the form of every group that sites send in a phase.

    Mixers are made for it as at the beginning of a study; what a form says may not depend on what came before.
    """
    server = _beginning(sites, task, training, seed)
    return {group.name: _form(group, server) for group in phase.sent}


def means_of(
    phase: Phase, sites: tuple[str, ...], task: Task, training: Training, seed: int
) -> dict[str, Summed | None]:
    """Return the form of every group of a phase that is a mean over sites; None where it needs all their tensors."""
    server, found = _beginning(sites, task, training, seed), dict[str, Summed | None]()
    for group in phase.sent:
        try:
            mixer = None if group.personal else group.mix(server)
        except (LookupError, AttributeError, MedsiloError):
            found[group.name] = None
            continue
        if isinstance(mixer, WeightedMean):
            form = form_of(mixer)
            found[group.name] = form if isinstance(form, Summed) else None
    return found


def _beginning(sites: tuple[str, ...], task: Task, training: Training, seed: int) -> ServerSide:
    return ServerSide(sites, {}, {}, frozenset, task, training, seed, Compute(), None, lambda: None)


def _form(group: Group, server: ServerSide) -> Form:
    try:
        return form_of(group.mix(server))
    except (LookupError, AttributeError, MedsiloError):
        return Unsealable("its mixer is made of what came before, so how it is sealed is not known beforehand")
