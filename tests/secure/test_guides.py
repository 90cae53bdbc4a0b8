"""Run the commands on the lead's page and the hospital's pages as printed, with real kits and mutual TLS."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from medsilo import cli
from tests.commands import joined
from tests.secure.consortium import SERVER, Consortium, wait_until

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("guides")]
LEAD, HOSPITALS = "lead@clinic.example", {"st-anna": "strict-hospital", "university-clinic": "teaching-hospital"}
CONSORTIUM = "docs/study/consortium.md"
ABORT = "medsilo cancel <id> --kit ..."
PROGRAMS = ("medsilo ", "nvflare ", "openssl ", "python provisioning")
FILLED = {
    "medsilo status --kit <kit>": "medsilo status --kit kits/it@st-anna.example",
    "JOB -o FOLDER": "jobs/fedavg -o prepared",
    **{"--kit ...": f"--kit kits/{LEAD}", "<kit>": "kits/university-clinic", "KIT": "kits/university-clinic"},
    **{"<job>": "fedavg", "check fedavg": "check jobs/fedavg", "kits/fl.example.org": f"kits/{SERVER}"},
    **{"/backup/": "backup/", "/srv/fl.example.org": "moved/kit", "/var/lib/medsilo": "moved/storage"},
}
SHORTER = {
    "--seeds 0,1,2,3": "--seeds 0 --set training.rounds=1 --at-once 1",
    "participation.sites=[": 'training.rounds=2" --set "participation.sites=[',
}
GROUPS = ("medsilo kits", "medsilo release")
ELSEWHERE = (
    "nvflare deploy",
    "nvflare job",
    "python provisioning/containers/prepare.py",
    "python provisioning/metrics.py",
    "medsilo approve",
)


def printed(page: Path, part: str = "") -> Iterator[str]:
    fenced, text = False, joined(page.read_text())
    if part:
        text = text.partition(f"\n## {part}\n")[2].partition("\n## ")[0]
    for line in re.sub(r"(`[^`\n]*)\n([^`\n]*`)", r"\1 \2", text).splitlines():
        fenced ^= line.startswith("```")
        for code in [line] if fenced else re.findall(r"`([^`]+)`", line):
            name = 3 if code.startswith(GROUPS) else 2
            if code.startswith(PROGRAMS) and len(code.split()) > name and not code.startswith(ELSEWHERE):
                yield re.sub(r"\s+#.*", "", code)


def lead_types(root: Path) -> list[str]:
    return list(printed(root / CONSORTIUM, "The commands"))


@dataclass
class Walk:
    root: Path
    job: str = ""
    words: dict[str, str] = field(default_factory=dict)

    def type(self, line: str, folder: str = "") -> str:
        for told, own in {**FILLED, **SHORTER, **self.words, "<id>": self.job}.items():
            line = line.replace(told, own)
        words = shlex.split(line)
        if words[0] == "medsilo":
            with (
                chdir(self.root / folder),
                redirect_stdout(io.StringIO()) as out,
                redirect_stderr(io.StringIO()) as err,
            ):
                code = cli.main(words[1:])
            assert code == 0, f"{line}: {out.getvalue()[-3000:]} {err.getvalue()[-3000:]}"
            if words[1] in ("submit", "resume") and "-o" not in words:
                self.job = out.getvalue().split()[-1]
            return out.getvalue()
        environment = {
            **os.environ,
            "HOME": str(self.root),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        done = subprocess.run(
            words, cwd=self.root / folder, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{line}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
        return done.stdout

    def start_long(self) -> None:
        self.type('medsilo submit jobs/fedbn --kit ... --set training.rounds=300 --set "participation.minimum=2"')


class Guided(Consortium):
    lead = LEAD


@pytest.fixture(scope="module")
def guided(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guided]:
    root, folder = Path(__file__).resolve().parents[2], tmp_path_factory.mktemp("guided")
    for name in ("jobs", "site_configs"):
        (folder / name).symlink_to(root / name)
    shutil.copytree(root / "provisioning", folder / "provisioning")

    def provision(file: Path, kits: Path) -> None:
        values = yaml.safe_load((root / "provisioning/consortium.yaml").read_text())
        own = yaml.safe_load(file.read_text())["server"]
        values["server"] |= {name: own[name] for name in ("host", "port", "storage")}
        (folder / "provisioning/consortium.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        (line,) = {line for line in lead_types(root) if line.startswith("medsilo kits make")}
        Walk(folder).type(line)
        assert kits.is_dir()

    consortium = Guided(folder, HOSPITALS, provision)
    for name in HOSPITALS:  # the commands of the hospital's page need folders for data and results
        settings = {"data": str(folder / "data"), "output": str(folder / "results" / name), "device": "cpu"}
        (consortium.kit(name) / "local/medsilo.yaml").write_text(yaml.safe_dump(settings))
    (folder / "data").mkdir()
    try:
        consortium.start()
        yield consortium
    finally:
        consortium.stop()


def test_a_fresh_kit_may_go(guided: Guided) -> None:
    for name in HOSPITALS:
        told = json.loads(Walk(guided.root).type(f"medsilo check jobs/fedavg --kit kits/{name} --json"))
        assert not [one for one in told["findings"] if one["severity"] == "stops"]


def await_end(guided: Guided, job: str) -> None:
    session = guided.session()
    try:
        wait_until(lambda: str(session.get_job_status(job)).startswith("FINISHED"), 120, "the job's end")
    finally:
        session.close()


def test_the_lead_s_guide_works(guided: Guided, root: Path) -> None:
    walk, broken_off = Walk(guided.root), Walk(guided.root)
    for line in (*printed(root / CONSORTIUM, "Choose a method"), *lead_types(root)):
        if "medsilo canary" in line:
            continue
        if not line.startswith("medsilo resume"):
            walk.type(line)
            continue
        broken_off.start_long()
        for what in (ABORT, line, ABORT):
            broken_off.type(what)
            if what == ABORT:
                await_end(guided, broken_off.job)


FOLDERS = {
    **dict.fromkeys(("nvflare cert request", "nvflare package"), "requests/st-anna"),
    "openssl": "kits/st-anna",
}


def test_the_readme_of_kits_works(guided: Guided, root: Path) -> None:
    walk, lines = Walk(guided.root), list(dict.fromkeys(printed(root / "provisioning/README.md")))
    # runs disable-client last, because the disabled hospital could not join a later study
    lines.sort(key=lambda line: "disable-client" in line)
    file = guided.root / "provisioning/consortium.yaml"
    all_of_them = file.read_text()
    for line in lines:
        if "--requests" in line:
            values = yaml.safe_load(all_of_them)
            values["people"] = [one for one in values["people"] if one["role"] != "project_admin"]
            file.write_text(yaml.safe_dump(values))
        if line.startswith("medsilo cancel"):
            walk.start_long()
        if line.startswith("nvflare cert approve"):
            shutil.copy(guided.root / "requests/st-anna/st-anna/st-anna.request.zip", guided.root)
        if "<root's>" in line:
            (signed,) = guided.root.rglob("st-anna.signed.zip")
            shutil.copy(signed, guided.root / "requests/st-anna")
        said = walk.type(line, next((own for start, own in FOLDERS.items() if line.startswith(start)), ""))
        if line.startswith("medsilo resume"):
            walk.type(ABORT)
        if line.startswith(("medsilo cancel", "medsilo resume")):
            await_end(guided, walk.job)
        if line.startswith("nvflare cert init"):
            (walk.words["<root's>"],) = re.findall(r"SHA256:[0-9A-F:]+", said)
        if "--requests" in line:
            file.write_text(all_of_them)
