"""List the goal of each hostile script in the folder `hostile`, and the expected result of running the script at a
hospital.

`python -m tests.attacks.hostile_scripts` writes the table of hostile scripts into docs/trust/airlock.md. The tests in
test_hostile_scripts.py run each hostile script at a hospital, and compare the result with the expected result.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent / "hostile"
PAGE = Path(__file__).parents[2] / "docs/trust/airlock.md"
BEGIN, END = "<!-- hostile: written by 'python -m tests.attacks.hostile_scripts' -->", "<!-- end of hostile -->"
BESIDE = {"lead"}

# Expected results of hostile scripts. "walls": each attempt fails, and the script sends no answer. "refused": the
# hospital rejects the script's answer and gives a reason. "nothing": the answer contains no result of the attack.
# "counted": bits of data leave the hospital, and left.jsonl records the number of these bits.
Verdict = Literal["walls", "refused", "nothing", "counted"]
ENDED = "the training script ended before its answer"
SENT = "its tensors are not those that the plan sends"
SPOILT = "its tensors hold what no training gives"
NO_MESSAGE = "it is no message of medsilo"
NUMBERS = "its numbers are not those of this task"
HOURS = "hours for an answer (room.hours)"


@dataclass(frozen=True)
class Case:
    verdict: Verdict
    reason: str = ""  # words in the hospital's reason for rejecting the script
    as_user: str = ""  # the hospital's reason for rejecting the script if the kit runs without root's rights
    leaves: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 1
    sites: tuple[str, ...] = ("a",)
    slow: bool = False
    by_group: bool = False  # only the kernel's control group stops the script
    command: str = "python3 -u"  # the lead's command, which starts the script


WALLS = Case("walls", ENDED)
CASES: dict[str, Case] = {
    "tcp": WALLS,
    "udp": WALLS,
    "unix": WALLS,
    "abstract": WALLS,
    "netlink": WALLS,
    "dns": WALLS,
    "other_hospital": Case("walls", ENDED, slow=True),
    "kit": WALLS,
    "keyring": WALLS,
    "proc_of_others": WALLS,
    "ptrace": WALLS,
    "links": WALLS,
    "hard_links": Case("walls", ENDED, slow=True),
    "devices": WALLS,
    "signals": Case("walls", "the training script was killed"),
    "command_options": Case("walls", ENDED, command="--bind / / python3"),
    "fork_bomb": Case("refused", "processes and threads (room.processes)", as_user=ENDED, slow=True),
    "memory": Case("refused", "more memory than 2048 MiB (memory_limit)", slow=True),
    "memory_in_files": Case("refused", ENDED),
    "memory_in_segments": Case("refused", ENDED),
    "many_eaters": Case("refused", "more memory than 2048 MiB (memory_limit)", slow=True),
    "idle_memory": Case(
        "refused",
        "more memory than 512 MiB (memory_limit)",
        settings={"memory_limit": 512},
        rounds=2,
        sites=("a", "b"),
        slow=True,
    ),
    "socket_buffers": Case("refused", "more than 2048 sockets", slow=True),
    "page_tables": Case(
        "refused", "more memory than 512 MiB (memory_limit)", settings={"memory_limit": 512}, slow=True
    ),
    "dead_leader": Case(
        "refused", "more memory than 512 MiB (memory_limit)", settings={"memory_limit": 512}, slow=True
    ),
    "memory_of_nobody": Case(
        "refused", "more memory than 512 MiB (memory_limit)", settings={"memory_limit": 512}, slow=True, by_group=True
    ),
    "memory_in_pipes": WALLS,
    "machine_wide": WALLS,
    "leases": WALLS,
    "full_scratch": WALLS,
    "empty_files": Case("refused", "files in its scratch (room.scratch)", slow=True),
    "sleeping": Case("refused", HOURS, settings={"room": {"hours": 0.0003}}),
    "busy_loop": Case("refused", HOURS, settings={"room": {"hours": 0.0003}}),
    "many_messages": Case("refused", NO_MESSAGE, slow=True),
    "endless_talk": Case("refused", HOURS, settings={"room": {"hours": 0.003}}, slow=True),
    "huge_message": Case("refused", SENT, slow=True),
    "huge_state": Case("refused", ENDED, slow=True),
    "descriptors": Case("refused", NO_MESSAGE, slow=True),
    "deep_json": Case("refused", NO_MESSAGE, slow=True),
    "wrong_names": Case("refused", SENT, slow=True),
    "nan": Case("refused", SPOILT, slow=True),
    "huge_number": Case("refused", "its update is larger than border.norm", slow=True),
    "huge_integer": Case("refused", NUMBERS, slow=True),
    "names_in_metrics": Case("refused", NUMBERS, slow=True),
    "metric_per_patient": Case("nothing", slow=True),
    "logs": Case("refused", ENDED, slow=True),
    "pickles": Case("refused", NO_MESSAGE, slow=True),
    "fobs_objects": Case("refused", NO_MESSAGE, slow=True),
    "nvflare_send": Case("nothing", slow=True),
    "get_engine": Case("nothing", slow=True),
    "environment": WALLS,
    "ld_preload": WALLS,
    "site_packages": Case("walls", ENDED, slow=True),
    "sitecustomize": WALLS,
    "second_room": Case("nothing", sites=("a", "b"), slow=True),
    "low_bits": Case("counted", leaves="the 26 bytes of the name, as weights", slow=True),
    "batch_norm": Case("counted", leaves="the 26 bytes of the name, as a mean and a count of batches", slow=True),
    "samples": Case("counted", leaves="the script's count of cases, rounded", slow=True),
    "timing": Case("counted", leaves="one bit in each round, as the seconds of the answer", rounds=4, slow=True),
    "takes_memory": Case("counted", leaves="the script's memory use in MiB", slow=True),
}
WORDS: dict[Verdict, str] = {
    "walls": "stopped by the sandbox",
    "refused": "stopped",
    "nothing": "the script trains normally; the attack sends no data",
    "counted": "**leaves**, counted in `left.jsonl`",
}


def goal_of(name: str) -> str:
    first = (HERE / f"{name}.py").read_text("utf-8").splitlines()[0]
    return first.removeprefix("# Tries ").rstrip(".")


def scripts() -> set[str]:
    return {file.stem for file in HERE.glob("*.py")} - BESIDE


def table() -> str:
    rows = ["| a script tries | result | text in the hospital's message or in `left.jsonl` |", "|---|---|---|"]
    for name, case in CASES.items():
        seen = (
            f"…{case.reason}" if case.reason else case.leaves or "only the tensors and scores that every script sends"
        )
        rows.append(f"| {goal_of(name)} | {WORDS[case.verdict]} | {seen} |")
    return "\n".join(rows)


def document() -> str:
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(document(), "utf-8")
