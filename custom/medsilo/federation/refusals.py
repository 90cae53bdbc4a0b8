"""Describe an error in words that a site may send. For an error that medsilo raises, the words are its message.
For any other error, the words are the error's type and the line in medsilo's code.
"""

import errno
import traceback

from medsilo.core.errors import MedsiloError, TemporaryRefusal
from medsilo.core.files import FULL
from medsilo.core.package import place_in_package
from medsilo.runs.paths import ERRORS


def public_reason(error: Exception) -> str:
    """Return an error's reason in one line. Messages of libraries other than medsilo are left out, because file names
    in these messages may name patients.
    """
    if isinstance(error, MedsiloError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"the Python package {error.name!r} is missing at this site; install it"
    if is_out_of_memory(error):
        return "out of memory at this site; lower training.batch_size, or allow more (memory_limit in its medsilo.yaml)"
    if _is_full(error):
        return "this site's disk is full; free space"
    frames = ((place_in_package(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
    ours = [f" in {file}:{line}" for file, line in frames if file]
    place = ours[-1] if ours else ""
    return f"{type(error).__name__}{place}; {ERRORS} in the site's own results has the details"


def passes(error: Exception) -> bool:
    """True if the cause of the error may disappear, so that the site may succeed if the server repeats the request."""
    return isinstance(error, TemporaryRefusal) or _is_full(error)


def _is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def is_out_of_memory(error: Exception) -> bool:
    """True if the GPU or the CPU ran out of memory. For CPU memory, only the message of torch's error shows whether
    memory ran out.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    told = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return told or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def details(error: Exception) -> str:
    """Return an error's traceback and private details; both may name patients, so they must stay at the site."""
    return "".join(traceback.format_exception(error)) + getattr(error, "private", "")
