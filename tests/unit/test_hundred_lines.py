"""A hundred command lines, half of them wrong: each wrong one is a line that names what is wrong and what to do."""

import json
import shlex
from pathlib import Path

import pytest

from medsilo import cli

RIGHT = """
--help
-h
--version
-V
version
help
help run
demo --help
init --help
init -h
run --help
run -h
compare --help
resume --help
kits make --help
submit --help
status --help
cancel --help
download --help
kits backup --help
kits restore --help
report --help
disclosure jobs/harmofl
prune --help
predict --help
release export --help
disclosure --help
check --help
approve --help
ledger --help
release make --help
release test --help
release export -h
predict -h
list --help
nnunet --help
nnunet plan --help
nnunet measure --help
kits rehearse --help
help kits
help release
kits --help
release --help
list
list --json
disclosure jobs/fedavg
disclosure jobs/fedbn --set training.rounds=3
disclosure fedavg
disclosure jobs/fedavg --json
submit jobs/fedavg --out right/packed
""".strip().splitlines()
WRONG = """
compare --folds x | --folds: give a whole number (
compare --methods fedavg --folds 1 | --folds: give a number greater than or equal to 3
compare --row "a: training.rounds" | is not 'TITLE: KEY=VALUE ...'
compare --at-once 0 | --at-once: give a number greater than or equal to 1
compare --task nothing --methods local | did you mean|choose one of
compare --plan nothing --methods local | no job at nothing: it needs app/config/plan.yaml
compare | give --methods local,fedavg
run jobs | it needs app/config/plan.yaml; jobs in it: adafed
run jobs/fedavg --set | --set needs a value
run jobs/fedavg --set seed | write it as key.subkey=value
run jobs/fedavg --set seed=-1 | seed: -1 is too small; give 0 or more
run jobs/fedavg --set nothing.x=1 | nothing: unknown key
run jobs/fedavg --set algorithm=fedbn | set algorithm.name=fedbn
run jobs/fedavg --device gpu | use auto, cpu, cuda
run jobs/fedavg --settings nothing | give the folder that holds medsilo.yaml [nothing]
run jobs/fedavg --engine inproces | is not one of 'simulator', 'inprocess'
run jobs/central | --engine inprocess
resume nothing | nothing is no run's folder; give one
report nothing | give the folder that holds summary.json [nothing]
report jobs | has no summary.json
withdraw nothing | 'withdraw' is no command
release test nothing --as st-anna --lead X | there is no release.json; give the folder or file that was signed
prune nothing | give one like runs/ [nothing]
prune . --older-than x | --older-than: give a number
init | give the folder of your data, or --example FOLDER
init nothing | the folder does not exist
predict nothing scan.nii.gz -o out | there is no such folder
predict jobs scan.nii.gz -o out | give a folder with supermodel.json or plan.yaml [jobs]
release export jobs | --out is missing
release export jobs --to x -o out | choose one of monai, nnunet
check jobs/fedavg --kit jobs | the folder is no kit
check nothing | no job at nothing
check jobs/fedavg --set participation.sites=[a,b] | which site is this? give --site
disclosure jobs/fedavg --settings nothing | there is no such folder of settings
approve jobs/fedavg --kit nothing | there is no such folder; give the kit's [nothing]
approve x --kit jobs --expires soon | write hours, days or weeks
approve --page --kit jobs --port x | --port: give a whole number
ledger | --kit is missing: this site's kit
ledger nonsense --kit jobs | is not one of 'show', 'accept'
kits make nothing -o kits | nothing cannot be read: there is no such file; give a consortium.yaml
kits make | CONSORTIUM is missing
kits mak x | did you mean make
release tets x | did you mean test
submit jobs/fedavg --kit nothing | there is no such folder; give the kit's [nothing]
status --kit jobs | the folder is no kit: its startup/ has none of
cancel x | --kit is missing
kits backup nothing -o x.zip | only a server has a backup: give its kit [nothing]
kits restore nothing --kit x | nothing is not there; use the file that medsilo kits backup wrote
kits rehearse nothing.yaml | there is no such file; give a consortium.yaml
nonsense | 'nonsense' is no command
""".strip().splitlines()


@pytest.fixture
def place(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").symlink_to(root / "jobs")
    return tmp_path


def test_there_are_a_hundred() -> None:
    assert len(set(RIGHT)) == len({line.partition(" | ")[0] for line in WRONG}) == 50


def test_right_lines_end_with_0_and_say_something(place: Path, capsys: pytest.CaptureFixture) -> None:
    for line in RIGHT:
        assert cli.main(shlex.split(line)) == 0, line
        told = capsys.readouterr()
        assert told.out.strip() and "Traceback" not in told.err, line
        if "--json" in line:
            json.loads(told.out)


def test_wrong_lines_are_one_line_with_the_remedy(place: Path, capsys: pytest.CaptureFixture) -> None:
    """And with --json one document of one shape; nothing is written."""
    before = sorted(place.iterdir())
    for row in WRONG:
        line, _, wanted = row.partition(" | ")
        code = cli.main(shlex.split(line))
        told = capsys.readouterr().err.splitlines()
        assert code in (1, 2) and len(told) == 1 and told[0].startswith("medsilo: "), (line, told)
        assert any(words in told[0] for words in wanted.split("|")) and len(told[0]) < 800, (line, told[0])
        words = shlex.split(line)
        acts = 2 if words[0] in ("kits", "nnunet", "release") else 1
        assert cli.main([*words[:acts], "--json", *words[acts:]]) == code, line
        document = json.loads(capsys.readouterr().out)
        assert {"error", "code", "kind"} <= document.keys() and document["code"] == code, line
        assert document["error"] in told[0], line
    assert sorted(place.iterdir()) == before


def test_a_folder_of_another_kind_is_refused_before_anything_is_written(
    place: Path, capsys: pytest.CaptureFixture
) -> None:
    kit = place / "kit/startup"
    kit.mkdir(parents=True)
    of_server = {"service": {"target": "a:1"}, "ssl_cert": "", "ssl_private_key": "", "ssl_root_cert": ""}
    (kit / "fed_server.json").write_text(json.dumps({"servers": [of_server]}))
    (place / "run").mkdir()
    (place / "run/plan.yaml").touch()
    for line, wanted in {
        "run jobs/fedavg --settings jobs": "has no medsilo.yaml; give the one that has it [jobs]",
        "compare --methods local -o run": "--out is the folder of a run; give another [run]",
        "approve jobs/fedavg --kit kit": "this kit is a server's; give the hospital's [kit]",
    }.items():
        assert cli.main(line.split()) == 1, line
        assert wanted in capsys.readouterr().err, line
    assert sorted(path.name for path in place.iterdir()) == ["jobs", "kit", "run"]
