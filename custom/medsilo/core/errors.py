"""Errors that a person can act on: one line that says what is wrong, where, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

from medsilo.core.text import plain

DIVERGED = "training diverged"  # begins a site's refusal of a round from whose weights it can't train


class MedsiloError(Exception):
    """Wrong input or a promise that could not be kept. Its text is safe to show anywhere.

    The text may leave a hospital (it becomes the reason of a refusal), so it never holds a path of a
    hospital's disk, a file name or a patient's identifier. What only the hospital may read goes into `private`.
    A value in it may come from anybody, so control characters are dropped and it is cut where it gets too long.

    >>> from medsilo.extend import MedsiloError
    >>> str(MedsiloError("no images are there; give a folder with such", private="/data/ward-3"))
    'no images are there; give a folder with such'
    """

    def __init__(self, message: str, private: str = "") -> None:
        super().__init__(plain(message))
        self.private = private

    @staticmethod
    @contextmanager
    def needing(told: str) -> Iterator[None]:
        """Say in one line what is to be installed, where a package that may be absent is imported inside."""
        try:
            yield
        except ImportError as error:
            raise MedsiloError(told, str(error)) from error


class PlanError(MedsiloError):
    """The plan is wrong: names the key, the value and the fix."""


class YamlError(MedsiloError):
    """A text is no YAML as it is read here: in which line, and why. Whoever reads the file says which file it is."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        self.problem, self.line = problem, line
        super().__init__(f"{f'line {line}' if line else 'the file'} is not valid YAML: {problem}")


class DataError(MedsiloError):
    """A site's data are absent or unusable.

    >>> raise DataError("no image fits images/*.png; correct data.images", private="/data/kidney")
    Traceback (most recent call last):
    medsilo.core.errors.DataError: no image fits images/*.png; correct data.images
    """


class Unfit(DataError):
    """Cases that a plan can't be learned from. Which, and how many, tells of patients: a lead chooses the plan."""


class Refused(MedsiloError):
    """A message that must not enter a sum, with the reason.

    >>> raise Refused("weights of layer 3 are not finite")
    Traceback (most recent call last):
    medsilo.core.errors.Refused: weights of layer 3 are not finite
    """


class Passing(Refused):
    """A refusal whose reason passes: asked again, the same party may answer."""


class NoRoom(Passing):
    """A disk is full."""


class Died(Passing):
    """The process stopped while it was working on this request. A new one runs, and may answer if asked again."""


class Lacks(Refused):
    """A site lacks a file that the plan's network begins with: it is sent that file."""


class ParticipationError(MedsiloError):
    """Fewer sites than the plan agreed on."""


class Aborted(MedsiloError):
    """The run was told to stop."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Say in one line that a file of ours is damaged, whatever goes wrong over its content."""
    try:
        yield
    except MedsiloError:
        raise
    except Exception as error:
        raise MedsiloError(
            f"{what} is damaged or was changed ({type(error).__name__}); put it back from a copy, or start again",
            private=" ".join(str(error).split()),
        ) from error
