"""The final states of NVFlare's jobs and their meanings, for `medsilo status`, events, messages and
automatic restarts.
"""

from dataclasses import dataclass

OVER = "FINISHED:"  # prefix of the state of a job that has ended
COMPLETED, ABORTED, COULD_NOT_START = (f"{OVER}{how}" for how in ("COMPLETED", "ABORTED", "FAILED_TO_RUN"))


@dataclass(frozen=True)
class End:
    """A final state of a job.

    Args:
        passes: whether medsilo may restart the job's study automatically
    """

    words: str
    passes: bool = False
    needs_somebody: bool = True  # whether somebody must act, if the study is not restarted automatically


ENDS = {
    COMPLETED: End("it finished", needs_somebody=False),
    ABORTED: End("somebody ended the job", needs_somebody=False),
    f"{OVER}ABNORMAL": End("the server, or its process for the job, was ended over it", passes=True),
    f"{OVER}EXECUTION_EXCEPTION": End("a process of the job died, at the server or at a hospital", passes=True),
    COULD_NOT_START: End("the job could not start", passes=True),
    f"{OVER}ABANDONED": End("the server ended over it", passes=True),
    f"{OVER}CAN_NOT_SCHEDULE": End("its hospitals were not there for it in time"),
}
UNKNOWN = End("it ended in a way that this version of medsilo does not know")


def is_over(status: str) -> bool:
    """True if this state means that a job has ended."""
    return status.startswith(OVER)


def end_of(status: str) -> End:
    """Return the meaning of a job's final state."""
    return ENDS.get(status, UNKNOWN)


def study_state(runs: bool, last: tuple[str, bool] | None, status: str | None) -> str:
    """Return a study's state: running, waits (for an automatic restart), finished, failed, cancelled or stopped.

    Args:
        runs: whether the process of the study's last job is running
        last: the last job's last event, and whether somebody must act
        status: the status in the study's summary, if any
    """
    what, needs_somebody = last or ("", True)
    if runs:
        return "running"
    if what in ("waits", "failed") and not needs_somebody:
        return "waits"
    if status == "finished":
        return status
    return "cancelled" if what == "ended" else status or "stopped"


def goes_on(seconds: float, turn: str) -> str:
    """Return a text about the time of a study's next automatic restart.

    Args:
        seconds: seconds until the restart; 0 if the restart waits for hospitals
        turn: the number of this attempt and of the allowed attempts, as text
    """
    return f"goes on in {seconds:.0f} s, {turn}" if seconds > 0 else f"goes on when all its hospitals are back, {turn}"
