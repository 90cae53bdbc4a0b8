"""Define errors whose message names the fault, its place and the remedy in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from medsilo.core.text import plain

# the beginning of a site's error message when training gives NaN or infinity
DIVERGED = "training diverged"


class MedsiloError(Exception):
    """The base class of medsilo's errors, whose messages are safe to show to anybody.

    A hospital may send the message to the server, so it must not have paths, file names or patients' identifiers.
    `private` has details for the hospital only. A message may quote values from another party, so control characters
    are removed and long messages are truncated.

    Args:
        message: one line: the fault, its place, and the remedy
        private: details for the hospital alone

    >>> from medsilo.extend import MedsiloError
    >>> str(MedsiloError("no images are there; give a folder with such", private="/data/ward-3"))
    'no images are there; give a folder with such'
    """

    def __init__(self, message: str, private: str = "") -> None:
        super().__init__(plain(message))
        self.private = private

    @staticmethod
    @contextmanager
    def kept_back(told: str) -> Iterator[None]:
        """Replace the message of an error raised in the context, because it may quote a hospital's data."""
        try:
            yield
        except MedsiloError as error:
            raise MedsiloError(told, f"{error} {error.private}".strip()) from error

    @staticmethod
    @contextmanager
    def needing(told: str) -> Iterator[None]:
        """Replace an ImportError raised in the context by this message, which names the extra to install."""
        try:
            yield
        except ImportError as error:
            raise MedsiloError(told, str(error)) from error


class PlanError(MedsiloError):
    """The plan is invalid; the message names the key, the value and the remedy."""


class YamlError(MedsiloError):
    """A text is not valid YAML, or has YAML that medsilo rejects; the message has the line and the reason."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        self.problem, self.line = problem, line
        super().__init__(f"{f'line {line}' if line else 'the file'} is not valid YAML: {problem}")


class DataError(MedsiloError):
    """A site's data are missing or unusable.

    >>> raise DataError("no image fits images/*.png; correct data.images", private="/data/kidney")
    Traceback (most recent call last):
    medsilo.core.errors.DataError: no image fits images/*.png; correct data.images
    """


class Unfit(DataError):
    """A site's cases do not fit the plan.

    Details stay at the site, because a lead could choose plans to learn about patients from them.
    """


class Refused(MedsiloError):
    """A message or request is rejected, with the reason.

    >>> raise Refused("weights of layer 3 are not finite")
    Traceback (most recent call last):
    medsilo.core.errors.Refused: weights of layer 3 are not finite
    """


class Passing(Refused):
    """A rejection for a temporary reason, so that repeating the request may succeed."""


class NoRoom(Passing):
    """A disk is full."""


class Died(Passing):
    """The training process died during this request. A new process was started, so that repeating the request may
    succeed."""


class Lacks(Refused):
    """A site lacks a file of initial weights, which the server then sends."""


class ParticipationError(MedsiloError):
    """Fewer sites take part than the plan requires."""


class Aborted(MedsiloError):
    """The run was asked to stop."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Report any error in reading one of medsilo's own files as a damaged file."""
    try:
        yield
    except MedsiloError:
        raise
    except Exception as error:
        raise MedsiloError(
            f"{what} is damaged or was changed ({type(error).__name__}); put it back from a copy, or start again",
            private=" ".join(str(error).split()),
        ) from error
