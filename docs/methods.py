"""The table of docs/research/methods.md: from each method's class and file, and from what method_facts says of it.

`python -m docs.tables` writes it. What leaves begins with the titles of the groups that the method's phases send.
"""

import inspect
import re
from collections import Counter
from collections.abc import Mapping

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from docs.markdown import table
from medsilo.check.method_facts import FACTS
from medsilo.registry import METHODS

OURS = {name: METHODS[name] for name in FACTS}  # other plug-ins have pages of their own
OFTEN = 6  # a key that more methods have is no method's own


def overview() -> str:
    """Return all methods in one table: a line each."""
    held = Counter(key for method in OURS.values() for key in method.model_fields)
    rows, known = [], dict[tuple[str, ...], str]()
    for name, method in OURS.items():
        leaves, sent, work, when = FACTS[name]
        own = tuple(f"`{key}` {_default(method, key)}".strip() for key in method.model_fields if _is_own(held, key))
        numbers = f"as {known[own]}" if own in known else ", ".join(own) or "–"
        if own:
            known.setdefault(own, name)
        file = method.__module__.replace(".", "/")
        idea = " ".join(inspect.cleandoc(method.__doc__ or "").partition("\n\n")[0].split())
        cost = "; ".join(cell.removeprefix("none; ") for cell in (sent, work) if cell not in ("1", "none", "–")) or "–"
        title = f'<a name="{name}"></a>[{name}](../../custom/{file}.py)'
        rows.append((title, method.paper, idea, leaves, cost, numbers, when))
    return table(("method", "paper", "idea", "leaves a hospital", "bytes, work", "numbers", "try it for"), rows)


def _is_own(held: Mapping[str, int], key: str) -> bool:
    return held[key] <= OFTEN and key != "name"


def _default(method: type[BaseModel], key: str) -> str:
    """Return a key's default, if it is a number or a word."""
    value = method.model_fields[key].get_default(call_default_factory=True)
    plain = value is not PydanticUndefined and isinstance(value, bool | int | float | str | tuple)
    return re.sub(r"^(True|False)$", lambda found: found[0].lower(), str(value)) if plain else ""
