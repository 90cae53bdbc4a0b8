"""What benchmarks play instead of hospitals keeps up with what the server asks of one."""

from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
@pytest.mark.parametrize("sync", ["none", "server-adam"])
def test_made_up_sites_go_through_a_whole_study(sync: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import fedsm

    _, given, parcel = fedsm.server_memory(3, "compact", sync)
    assert parcel < given < 3 * parcel  # one global model, one selector, three personal models
