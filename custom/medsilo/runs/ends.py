"""Define the final states of NVFlare's jobs and their meanings."""

from dataclasses import dataclass

OVER = "FINISHED:"  # prefix of the state of a job that has ended
COMPLETED, ABORTED, COULD_NOT_START = (f"{OVER}{how}" for how in ("COMPLETED", "ABORTED", "FAILED_TO_RUN"))


@dataclass(frozen=True)
class End:
    """A final state of a job; it determines whether medsilo may restart the job's study automatically."""

    words: str
    passes: bool = False
    needs_somebody: bool = True  # whether somebody must act, unless medsilo restarts the study automatically


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
    return status.startswith(OVER)


def end_of(status: str) -> End:
    return ENDS.get(status, UNKNOWN)


def study_state(runs: bool, last: tuple[str, bool] | None, status: str | None) -> str:
    """Return a study's state: running, waits (for an automatic restart), finished, failed, cancelled or stopped.

    Args:
        last: the type of the last job's last event, and whether somebody must act
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
    return f"goes on in {seconds:.0f} s, {turn}" if seconds > 0 else f"goes on when all its hospitals are back, {turn}"
