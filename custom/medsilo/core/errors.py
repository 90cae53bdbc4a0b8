"""Define errors. Each error has a one-line message that names the fault, the place of the fault, and the remedy."""

from collections.abc import Iterator
from contextlib import contextmanager

from medsilo.core.text import plain

# prefix of the error message that a site sends when its training gives NaN or infinity
DIVERGED = "training diverged"


class MedsiloError(Exception):
    """The base class of medsilo's errors, whose messages are safe to show to anybody.

    A hospital may send the message to the server, so the message must not have paths, file names or patients'
    identifiers. The attribute `private` has details that the hospital never sends. A message may quote values that
    another party sent, so this class removes control characters and truncates long messages.

    Args:
        message: One line that names the fault, the place of the fault, and the remedy.
        private: Details that the hospital never sends.

    >>> from medsilo.extend import MedsiloError
    >>> str(MedsiloError("the folder has no images; choose another folder", private="/data/ward-3"))
    'the folder has no images; choose another folder'
    """

    def __init__(self, message: str, private: str = "") -> None:
        super().__init__(plain(message))
        self.private = private

    @staticmethod
    @contextmanager
    def kept_back(message: str) -> Iterator[None]:
        """Replace the message of a MedsiloError raised in the context, because the message may quote a hospital's data.

        Args:
            message: The new message.
        """
        try:
            yield
        except MedsiloError as error:
            raise MedsiloError(message, f"{error} {error.private}".strip()) from error

    @staticmethod
    @contextmanager
    def needing(message: str) -> Iterator[None]:
        """Turn an ImportError raised in the context into a MedsiloError.

        Args:
            message: The new error's message, which names the extra to install.
        """
        try:
            yield
        except ImportError as error:
            raise MedsiloError(message, str(error)) from error


class PlanError(MedsiloError):
    """The plan is invalid; the message names the key, the value and the remedy."""


class YamlError(MedsiloError):
    """A text is not valid YAML, or uses a feature of YAML that medsilo rejects."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        self.problem, self.line = problem, line
        super().__init__(f"{f'line {line}' if line else 'the file'} is not valid YAML: {problem}")


class DataError(MedsiloError):
    """A site's data are missing or unusable.

    >>> raise DataError("no image fits images/*.png; correct data.images", private="/data/kidney")
    Traceback (most recent call last):
    medsilo.core.errors.DataError: no image fits images/*.png; correct data.images
    """


class UnfitData(DataError):
    """A site's cases do not fit the plan.

    The details of the error stay at the site. If details of errors left the site, a lead could choose plans whose
    errors reveal facts about patients.
    """


class Refused(MedsiloError):
    """The party that raises this error rejects a message or a request of another party; the error's message states the
    reason.

    >>> raise Refused("weights of layer 3 are not finite")
    Traceback (most recent call last):
    medsilo.core.errors.Refused: weights of layer 3 are not finite
    """


class TemporaryRefusal(Refused):
    """A rejection for a temporary reason; a repeated request may succeed later."""


class NoRoom(TemporaryRefusal):
    """A disk is full."""


class ProcessDied(TemporaryRefusal):
    """The training process died during a request. A new training process has started after the old training process
    died, so the sender may repeat the request.
    """


class WeightsMissing(Refused):
    """A site lacks a file of initial weights that the study needs. If a site raises this error, the server sends the
    missing file to the site.
    """


class ParticipationError(MedsiloError):
    """Fewer sites take part than the plan requires."""


class Aborted(MedsiloError):
    """Another process or the user stopped the run."""


@contextmanager
def reading(subject: str) -> Iterator[None]:
    """Turn any error in the context, except MedsiloError, into a MedsiloError that reports a damaged file.

    Args:
        subject: The file that the context reads, as named in the error.
    """
    try:
        yield
    except MedsiloError:
        raise
    except Exception as error:
        raise MedsiloError(
            f"{subject} is damaged or was changed ({type(error).__name__}); put it back from a copy, or start again",
            private=" ".join(str(error).split()),
        ) from error
