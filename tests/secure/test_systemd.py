"""Run a hospital's kit under systemd with the kit's own unit, and a lead's script in the airlock there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import medsilo
from medsilo.airlock.border import LEFT
from medsilo.airlock.room import NO_ROOM, ability
from medsilo_lab.consortium.provision import SERVICE
from medsilo_lab.jobs import write_job
from tests.conftest import make_plan
from tests.secure.consortium import REGISTERED, Consortium
from tests.secure.test_scripts_tls import exported, studies

SYSTEMD = Path("/lib/systemd/systemd")
OWN = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--ipc", "--uts", "--mount-proc"]
ACCOUNT = 23_456
SITES = ["hospital-1", "hospital-2"]
# Before systemd starts, this script changes the mounts of a new namespace only. Only the kit, and new folders in
# memory, can be written there, and systemd finds no unit but the hospital's own.
BEGINS = """
set -e
mount --make-rprivate /
for place in /srv /opt /run; do mount -t tmpfs tmpfs $place; done
mkdir -p /srv/medsilo/{site} /opt/medsilo /opt/python /opt/empty /run/lock /run/systemd
mount --bind {kit} /srv/medsilo/{site}
mount --bind {base} /opt/python
mount --bind {made} /opt/medsilo
mount --bind {packages} /opt/medsilo/packages
mount --bind {code} /opt/medsilo/code
ldconfig -C {made}/ld.so.cache /opt/python/lib
for name in passwd group ld.so.cache; do mount --bind {made}/$name /etc/$name; done
for place in /etc/systemd/system /etc/systemd/system-generators /lib/systemd/system /lib/systemd/system-generators; do
  if [ -d $place ]; then mount --bind /opt/empty $place; fi
done
cp -r {made}/system /run/systemd/system
touch /dev/console
mount --bind {made}/console /dev/console
mount -t tmpfs tmpfs /tmp
mount -o remount,bind,ro /
export container=lxc
exec {systemd} --system --unit=medsilo.service --log-target=console --log-level=notice --show-status=no
"""


def _may_run_systemd() -> bool:
    """Return True if a test may start systemd here: as root, on a machine that no systemd manages."""
    return (
        os.geteuid() == 0
        and SYSTEMD.exists()
        and Path("/proc/1/comm").read_text().strip() != "systemd"
        and subprocess.run([*OWN, "mount", "--make-rprivate", "/"], capture_output=True).returncode == 0
    )


pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("systemd"),
    pytest.mark.skipif(not _may_run_systemd(), reason="no systemd, no root, or a machine that systemd manages"),
    pytest.mark.skipif(not ability().works, reason="no bubblewrap, or no user namespaces"),
]


class Supervised(Consortium):
    """A consortium whose first hospital runs as its kit's unit."""

    further = ""  # lines that the hospital adds with `systemctl edit`

    def start_party(self, party: str, kit: Path | None = None, **environment: object) -> subprocess.Popen:
        if party != SITES[0]:
            return super().start_party(party, kit, **environment)
        made = Path(tempfile.mkdtemp(dir=self.root))
        made.chmod(0o755)  # the unit's account uses this folder as /opt/medsilo
        self._make(made)
        own = {"site": party, "kit": self.kit(party), "base": sys.base_prefix, "made": made, "systemd": SYSTEMD}
        own |= {"packages": sysconfig.get_path("purelib"), "code": Path(medsilo.__file__).parents[1]}
        begins = BEGINS.format_map({name: shlex.quote(str(value)) for name, value in own.items()})
        with (self.root / f"{party}.log").open("a") as log:
            self.processes[party] = subprocess.Popen(
                [*OWN, "bash", "-c", begins], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self.processes[party]

    def _make(self, made: Path) -> None:
        """Write the files that the unit expects on a machine: an environment for Python, an account, and the unit."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        packages = made / f"lib/{version}/site-packages"
        for folder in (packages, made / "bin", made / "packages", made / "code", made / "system/medsilo.service.d"):
            folder.mkdir(parents=True)
        (packages / "medsilo.pth").write_text("/opt/medsilo/packages\n/opt/medsilo/code\n")
        (made / "pyvenv.cfg").write_text("home = /opt/python/bin\n")
        (made / "bin/python3").symlink_to(f"/opt/python/bin/{version}")
        (made / "console").touch()
        for name, line in (("passwd", "medsilo:x:{0}:{0}::/nowhere:/bin/sh\n"), ("group", "medsilo:x:{0}:\n")):
            (made / name).write_text(line.format(ACCOUNT) + Path("/etc", name).read_text())
        kit = self.kit(SITES[0])
        shutil.copy(kit / SERVICE, made / "system/medsilo.service")
        for target in ("sysinit", "basic", "network-online", "shutdown"):
            (made / f"system/{target}.target").write_text("[Unit]\nDefaultDependencies=no\n")
        # the kit's output, which the test reads
        output = f"StandardOutput=append:/srv/medsilo/{SITES[0]}/unit.log\nStandardError=inherit\n"
        (made / "system/medsilo.service.d/edit.conf").write_text(f"[Service]\n{output}{self.further}")
        for path in (kit, *kit.rglob("*")):
            os.chown(path, ACCOUNT, ACCOUNT)

    def log(self, name: str) -> str:
        own = self.kit(name) / "unit.log"
        return own.read_text(errors="replace") if name == SITES[0] and own.exists() else super().log(name)


@pytest.fixture(scope="module")
def supervised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    consortium = Supervised(tmp_path_factory.mktemp("systemd"), dict.fromkeys(SITES, "teaching-hospital"))
    try:
        consortium.start()
        yield consortium
    finally:
        consortium.stop()


def page(root: Path) -> str:
    """Return the lines of the page about the airlock that a hospital adds to its unit."""
    found = re.search(r"\n( +)\[Service\]\n((?:\1\w+=.*\n)+)", (root / "docs/trust/airlock.md").read_text())
    assert found
    return re.sub(r"(?m)^ +", "", found[2])


def test_a_hospital_takes_part_under_its_unit(supervised: Supervised, tmp_path: Path) -> None:
    write_job(tmp_path / "job", make_plan("fedavg", sites=SITES), study="under-systemd")
    assert supervised.run(tmp_path / "job") == "FINISHED:COMPLETED"
    folder = supervised.kit(SITES[0]) / "medsilo/under-systemd/sites" / SITES[0]
    assert folder.is_dir() and folder.stat().st_uid == ACCOUNT


def test_a_room_needs_the_lines_of_the_page(supervised: Supervised, root: Path, tmp_path: Path) -> None:
    """Without these lines, the hospital rejects a script and gives the reason. With these lines, the script runs."""
    for site in SITES:
        own = {"device": "cpu", "airlock": "required", "memory_limit": 4096, "public_data": True}
        (supervised.kit(site) / "local/medsilo.yaml").write_text(json.dumps(own))
    job = exported(root, tmp_path / "work", "FedBN", 2, SITES)
    for further in ("", page(root)):
        supervised.further, before = further, studies(supervised)
        supervised.end(supervised.processes[SITES[0]])
        since = len(supervised.log(SITES[0]))
        supervised.start_party(SITES[0])
        supervised.wait_for_log(SITES[0], REGISTERED, since)
        ended = supervised.run(job)
        if not further:
            assert ended != "FINISHED:COMPLETED" and NO_ROOM in supervised.log(SITES[0])
            continue
        assert ended == "FINISHED:COMPLETED"
        (study,) = studies(supervised) - before
        left = (supervised.kit(SITES[0]) / "medsilo" / study / "sites" / SITES[0] / LEFT).read_text().splitlines()
        assert [json.loads(line)["task"] for line in left] == ["join", "round", "round", "deliver", "test"]
