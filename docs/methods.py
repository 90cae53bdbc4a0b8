"""The sections of docs/methods.md: from each method's class and file, and from what method_facts says of it.

`python -m docs.tables` writes them. What leaves begins with the titles of the groups that the method's phases send.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence

from docs.markdown import table
from medsilo.check.method_facts import FACTS
from medsilo.registry import METHODS

OURS = {name: METHODS[name] for name in FACTS}  # other plug-ins have pages of their own


def overview() -> str:
    """Return all methods in one table: a line each, with when it is worth a try."""
    rows = [
        (f"[{method.title}](#{name})", method.paper, FACTS[name][3], FACTS[name][1]) for name, method in OURS.items()
    ]
    return table(("method", "paper", "worth a try", "bytes"), rows)


def sections(keys: Mapping[str, Sequence[tuple[str, str, str]]]) -> str:
    """Return a section for each method, with its own keys; keys of an earlier method are named with that."""
    first: dict[tuple[str, str, str], str] = {}
    for name in OURS:
        for row in keys[name]:
            first.setdefault(row, name)
    return "\n" + "\n".join(_section(name, keys[name], first) for name in OURS) + "\n"


def _section(name: str, keys: Sequence[tuple[str, str, str]], first: Mapping[tuple[str, str, str], str]) -> str:
    method, (leaves, sent, work, when) = OURS[name], FACTS[name]
    module = sys.modules[method.__module__]
    paper = " ".join((module.__doc__ or "").partition("\n\n")[0].split())
    file = method.__module__.replace(".", "/")
    example = f"medsilo run jobs/{name}"
    if method.pooled:
        example = f"medsilo run jobs/local --set algorithm.name={name} --engine inprocess"
    job = "" if method.pooled else f" Job: [{name}](../jobs/{name})."
    title = "" if paper.startswith(method.title) else f"**{method.title}.** "
    lines = [
        f"### {name}\n",
        f"{title}{paper} [Code](../custom/{file}.py).{job}\n",
        f"{inspect.cleandoc(method.__doc__ or '')}\n",
        f"- Worth a try: {when}.\n- Leaves a hospital: {leaves}\n- Bytes: {sent}\n- Extra work: {work}\n",
        f"```\n{example}\n```\n",
    ]
    if own := [(f"`{row[0]}`", *row[1:]) for row in keys if first[row] == name]:
        lines.append(table(("key", "values (default)", "meaning"), own))
    for other in dict.fromkeys(first[row] for row in keys if first[row] != name):
        shared = ", ".join(f"`{row[0]}`" for row in keys if first[row] == other)
        lines.append(f"Keys of [{other}](#{other}): {shared}.\n")
    return "\n".join(lines)
