"""Tell how the groups of a phase are sealed, as their mixers declare it."""

from medsilo.core.errors import MedsiloError
from medsilo.course.group import Group
from medsilo.course.phase import Phase
from medsilo.course.server_side import ServerSide
from medsilo.learning.loop import Compute
from medsilo.learning.training import Training
from medsilo.mixing.forms import Form, Unsealable, form_of
from medsilo.tasks.task import Task


def forms_of(phase: Phase, sites: tuple[str, ...], task: Task, training: Training, seed: int) -> dict[str, Form]:
    """Return the form of every group that sites send in a phase.

    Mixers are made for it as at the beginning of a study; what a form says may not depend on what came before.
    """
    server = ServerSide(sites, {}, {}, frozenset, task, training, seed, Compute(), None, lambda: None)
    return {group.name: _form(group, server) for group in phase.sent}


def _form(group: Group, server: ServerSide) -> Form:
    try:
        return form_of(group.mix(server))
    except (LookupError, AttributeError, MedsiloError):
        return Unsealable("its mixer is made of what came before, so how it is sealed is not known beforehand")
