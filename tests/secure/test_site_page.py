"""Over mutual TLS, a study waits for an approval on a hospital's page, and stops when the approval is withdrawn."""

from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from medsilo.runs import paths
from medsilo.runs.reading import read_rounds, read_summary
from medsilo_lab.jobs import write_job
from medsilo_page.pages import serve
from medsilo_page.watching import read_diary
from tests.browser import Browser, chromium
from tests.conftest import SITES, make_plan
from tests.secure.consortium import SERVER, Consortium, wait_until
from tests.unit.federation.test_participant import SMALL
from tests.unit.medsilo_page.test_site_page import Visitor, serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("consortium")]
HOSPITAL = SITES[0]
ISOLATED = SITES[1]
ROUNDS = 3000  # so many rounds that the study is stopped before its end


def wait_for(tab: Browser, expression: str) -> None:
    wait_until(lambda: bool(tab.ask(f"document.readyState === 'complete' && ({expression})")), 120, expression)


def follow(tab: Browser, selector: str) -> None:
    tab.ask("window.old = true")
    tab.click(selector)
    wait_for(tab, "window.old === undefined")


@pytest.mark.long
def test_approve_and_withdraw_while_it_runs(consortium: Consortium, tmp_path: Path) -> None:
    kit, plan = consortium.kit(HOSPITAL), make_plan("fedavg", *SMALL, f"training.rounds={ROUNDS}", sites=SITES[:2])
    local, run = kit / "local/medsilo.yaml", consortium.kit(SERVER) / "medsilo/approved"
    write_job(tmp_path / "first", plan, study="asks")
    write_job(tmp_path / "job", plan, study="approved")
    before, session = local.read_text(), consortium.session()
    local.write_text(f"{before}approval: required\n")
    try:
        with serving(serve(kit, 0)) as gate, chromium(tmp_path / "profile") as tab:
            own = f"{gate.start.partition('/start')[0]}{gate.base}"
            tab.do("Page.navigate", url=gate.start)
            wait_for(tab, "document.title.startsWith('Requests and studies of')")
            job = session.submit_job(str(tmp_path / "first"))
            asked = f"a[href$='plan/{plan.hash}']"

            def asks() -> bool:
                tab.ask("window.old = true; location.reload()")
                wait_for(tab, "window.old === undefined")
                return bool(tab.ask(f'!!document.querySelector("{asked}")'))

            wait_until(asks, 120, "the plan to ask")
            wait_until(lambda: str(session.get_job_status(job)).startswith("FINISHED"), 120, "its refusal")
            assert not run.with_name("asks").joinpath(paths.ROUNDS).exists()
            follow(tab, asked)
            assert tab.ask("document.body.innerText.includes('Nobody has decided')")
            follow(tab, "#approve")
            assert tab.ask("document.body.innerText.includes('approved')")

            job = session.submit_job(str(tmp_path / "job"))
            wait_until(lambda: len(read_rounds(run, growing=True)) >= 3, 120, "three rounds")
            tab.do("Page.navigate", url=f"{own}/study/approved")
            wait_for(tab, "document.querySelectorAll('#rows tr').length >= 3")
            many = tab.ask("document.querySelectorAll('#rows tr').length")
            wait_for(tab, f"document.querySelectorAll('#rows tr').length > {many}")
            follow(tab, "#stop")
            status = "document.body.innerText.includes('has withdrawn its approval of this plan')"
            assert tab.ask(status)
            wait_until(lambda: str(session.get_job_status(job)).startswith("FINISHED"), 120, "the job's end")
            tab.do("Page.navigate", url=f"{own}/study/approved")
            wait_for(tab, "document.body.innerText.includes('This hospital refused: this hospital has withdrawn')")
            assert not [line for line in tab.complaints if "favicon" not in line]
    finally:
        local.write_text(before)
        session.close()
    summary = read_summary(run)
    assert f"{HOSPITAL} refused: this hospital has withdrawn its approval" in summary.reason
    diary = read_diary(kit / f"medsilo/approved/sites/{HOSPITAL}")
    assert [line.kind for line in diary if line.kind != "answered"][-2:] == ["refused", "ended"]
    left = max(line.round for line in diary if line.kind == "answered")
    assert left == max(line.round for line in read_rounds(run) if HOSPITAL in line.answered) < ROUNDS


@pytest.mark.long
def test_the_trainer_s_death_and_its_reason_are_on_the_page(consortium: Consortium, tmp_path: Path) -> None:
    kit, changes = consortium.kit(ISOLATED), ["participation.when_missing=continue", "participation.minimum=1"]
    plan = make_plan("fedavg", *SMALL, *changes, f"training.rounds={ROUNDS}", sites=SITES[:2])
    write_job(tmp_path / "job", plan, study="fragile-page")
    run, session = consortium.kit(SERVER) / "medsilo/fragile-page", consortium.session()
    job = session.submit_job(str(tmp_path / "job"))
    try:
        wait_until(lambda: len(read_rounds(run, growing=True)) >= 3, 120, "three rounds")
        with serving(serve(kit, 0)) as gate:
            visitor = Visitor(gate)
            visitor.begin()

            def dies() -> bool:
                """Kill the trainer repeatedly, until a kill happens during a round, because events.log alone reports a
                death between two rounds.
                """
                for trainer in consortium.family(ISOLATED, "medsilo.federation.process.worker"):
                    with suppress(psutil.NoSuchProcess):
                        trainer.kill()
                return "the training process died" in visitor.page("/study/fragile-page")

            wait_until(dies, 120, "its death")
            assert "SIGKILL" in visitor.page("/study/fragile-page")
        died = [line for line in read_diary(kit / f"medsilo/fragile-page/sites/{ISOLATED}") if line.kind == "died"]
        assert died and all("the training process died (SIGKILL)" in line.reason for line in died)
    finally:
        session.abort_job(job)
        wait_until(lambda: str(session.get_job_status(job)).startswith("FINISHED"), 120, "the job's end")
        session.close()
