"""The executor's promises: aborts are seen at once, and no error text of others leaves the site."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal

from medsilo.core.errors import DataError, Died, Refused
from medsilo.federation.limits import Clock
from medsilo.federation.reasons import public_reason
from medsilo.flare.executor import Busy, MedsiloExecutor
from medsilo.flare.wire import to_parcel, to_shareable
from medsilo.runs.messages import Parcel
from medsilo.site.settings import Limits


class Abort(Signal):
    """Triggers by itself after a while."""

    def __init__(self, after: float) -> None:
        super().__init__()
        self.when = time.monotonic() + after

    @property
    def triggered(self) -> bool:  # type: ignore[override]
        return time.monotonic() > self.when


def test_training_that_stands_still_is_given_up_and_slow_training_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes that train here: one spins, one is stopped as a frozen machine stops it."""
    monkeypatch.setattr("medsilo.flare.executor.LOOK", 0.2)
    monkeypatch.setattr("medsilo.flare.executor.STOOD_STILL", 1.0)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            busy, started = Busy(), time.monotonic()
            while time.monotonic() - started < 2.5:
                busy.check()
                time.sleep(0.05)
            spinning.send_signal(signal.SIGSTOP)
            with pytest.raises(Died, match="stalled"):
                while time.monotonic() - started < 10:
                    busy.check()
                    time.sleep(0.05)
        finally:
            spinning.kill()


def test_an_abort_is_honoured_within_a_second_of_a_long_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    executor = MedsiloExecutor()
    slow = SimpleNamespace(answer=lambda parcel, stop: time.sleep(3))  # a batch that can't be interrupted
    monkeypatch.setattr(executor, "_begin", lambda parcel, fl_ctx, stop: (slow, Clock(Limits())))
    started = time.monotonic()
    reply = executor.execute("medsilo", to_shareable(Parcel()), FLContext(), Abort(after=0.2))
    assert reply.get_return_code() == ReturnCode.TASK_ABORTED
    assert time.monotonic() - started < 1.2


def test_work_that_nobody_waits_for_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server stops waiting after participation.timeout; so does the site, which is free for the next round then."""
    executor = MedsiloExecutor()
    slow = SimpleNamespace(answer=lambda parcel, stop: time.sleep(3))
    monkeypatch.setattr(executor, "_begin", lambda parcel, fl_ctx, stop: (slow, Clock(Limits())))
    monkeypatch.setattr(executor, "_write_private", lambda error, fl_ctx: None)
    with pytest.raises(Refused, match=r"took longer than participation\.timeout"):
        to_parcel(executor.execute("medsilo", to_shareable(Parcel(facts={"timeout": 0.5})), FLContext(), Signal()))


def test_own_words_leave_the_site_and_those_of_others_do_not() -> None:
    assert public_reason(DataError("the mask is empty", private="/data/MUELLER.nii")) == "the mask is empty"
    assert public_reason(ModuleNotFoundError("No module named 'x'", name="x")).startswith("the Python package 'x'")
    for error in (OSError(2, "No such file", "/data/MUELLER.nii"), KeyError("MUELLER"), RuntimeError("MUELLER")):
        reason = public_reason(error)
        assert "MUELLER" not in reason
        assert reason.startswith(type(error).__name__)


def test_an_error_names_the_place_in_our_code() -> None:
    from medsilo.learning.loop import batches

    try:
        next(batches(None, 1, None))  # type: ignore[arg-type]
    except TypeError as error:
        assert "learning/loop.py:" in public_reason(error)
