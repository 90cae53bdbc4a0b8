"""Over mutual TLS, a canary reports within two minutes which real hospitals are ready."""

import json
import time
from pathlib import Path

import pytest
import yaml

from medsilo import cli
from medsilo.runs import event_reading
from medsilo.site.accepted_settings import REMEMBERED
from tests.conftest import SITES
from tests.secure.consortium import LEAD, SERVER, Consortium, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pair")]
ONE, OTHER = SITES[:2]


def test_a_canary_says_of_each_hospital_whether_it_is_ready(
    pair: Consortium, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    local = pair.kit(OTHER) / "local/medsilo.yaml"
    before, data = local.read_text(), tmp_path / "data"
    data.mkdir()
    (data / "case-of-jones.png").write_bytes(b"x")

    def sent(*more: str) -> tuple[int, dict]:
        capsys.readouterr()
        started = time.monotonic()
        code = cli.main(["canary", "--kit", str(pair.kit(LEAD)), "--json", *more])
        assert time.monotonic() - started < 120
        return code, json.loads(capsys.readouterr().out)["hospitals"]

    try:
        described = {"approval": "none", "data": {"folder": str(data), "images": "*.png"}}
        local.write_text(yaml.safe_dump((yaml.safe_load(before) or {}) | described))
        code, found = sent()
        assert code == 0 and set(found) == {ONE, OTHER}
        assert [found[site]["data"] for site in (ONE, OTHER)] == ["not set", "readable"]
        assert all(one["ready"] and one["device"] == "cpu" and one["line"] > 1e4 for one in found.values())
        assert all(one["memory"] is not None and one["disk"] is not None for one in found.values())
        assert "jones" not in json.dumps(found)
        (data / "case-of-jones.png").unlink()
        code, found = sent("--set", f"participation.sites=[{ONE}, {OTHER}, {SITES[2]}]")
        assert code == 1 and found[ONE]["ready"]
        assert found[OTHER]["reached"] and "data" in found[OTHER]["reason"]
        assert not found[SITES[2]]["reached"]
    finally:
        local.write_text(before)
    assert sum("\tbegan\t" in line for line in event_reading.read(pair.kit(SERVER))) >= 2


def test_a_canary_that_nobody_approved_is_said_to_be_refused(pair: Consortium, capsys: pytest.CaptureFixture) -> None:
    locals_ = [pair.kit(site) / "local/medsilo.yaml" for site in (ONE, OTHER)]
    before = [path.read_text() for path in locals_]
    kit = str(pair.kit(LEAD))
    try:
        for path, text in zip(locals_, before, strict=True):
            path.write_text(yaml.safe_dump((yaml.safe_load(text) or {}) | {"approval": "required"}))
        assert cli.main(["canary", "--kit", kit, "--json"]) == 1
        found = json.loads(capsys.readouterr().out)["hospitals"]
        assert all("has not approved" in one["reason"] for one in found.values())

        def newest() -> dict:
            capsys.readouterr()
            assert cli.main(["status", "--kit", kit, "--json"]) == 0
            return json.loads(capsys.readouterr().out)["jobs"][0]

        wait_until(lambda: newest().get("outcome") == "refused: not approved", 600, "the reason")
        assert newest()["status"] == "FINISHED:EXECUTION_EXCEPTION"
        assert cli.main(["status", newest()["id"], "--kit", kit]) == 0
        told = capsys.readouterr().out
        assert "refused: not approved" in told and "EXECUTION_EXCEPTION" not in told
    finally:
        for path, text in zip(locals_, before, strict=True):
            path.write_text(text)
            # removes the file with the settings that other tests accepted
            (path.parents[1] / REMEMBERED).unlink(missing_ok=True)
    log = (pair.root / f"{SERVER}.log").read_text()
    assert any("INFO" in line and f"joined {ONE}: connected" in line for line in log.splitlines())
