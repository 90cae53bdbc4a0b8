"""Words for the death of a process of a site, which may leave it."""

import signal

from medsilo.runs.paths import WORKER_LOG

WHY: dict[signal.Signals | None, str] = {
    signal.SIGKILL: "the system does that when memory runs out; lower training.batch_size or free memory there"
}
UNKNOWN = f"the site's own {WORKER_LOG}, beside its results, may say why"


def how_it_died(code: int | None) -> str:
    """Return what an exit code tells, and what to do; None: the process stood still."""
    died_of = signal.Signals(-code) if code and code < 0 else None
    how = died_of.name if died_of else "it stood still" if code is None else f"exit code {code}"
    return f"({how}): {WHY.get(died_of, UNKNOWN)}; a new one goes on from the site's saved state"
