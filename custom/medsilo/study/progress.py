"""What a person sees while a study runs: one line per site and round."""

from typing import Any

from medsilo.core.text import plain


def round_lines(record: dict[str, Any], rounds: int, metric: str) -> list[str]:
    """The lines of one round; a site that is missing says why."""
    head = f"round {record['round']:>{len(str(rounds))}}/{rounds}"
    width = max(map(len, record["asked"]), default=0)
    lines = []
    for site in record["asked"]:
        facts = record["sites"].get(site)
        reason = record["refused"].get(site) or record["lost"].get(site)
        text = _facts(facts, metric) if facts else f"MISSING: {plain(reason)}"
        lines.append(f"{head}  {site:<{width}}  {text}")
        lines += [
            f"{head}  {site:<{width}}  WARNING: {plain(line)}" for line in record.get("warnings", {}).get(site, [])
        ]
    return lines


def _facts(facts: dict[str, Any], metric: str) -> str:
    return (
        f"{metric} before {_value(facts['validation'])}  loss {_value(facts['train_loss'])}  "
        f"{facts['samples']} cases  {facts['seconds']:.1f} s  "
        f"up {_bytes(facts['bytes_up'])}  down {_bytes(facts['bytes_down'])}"
    )


def _value(value: float | None) -> str:
    return "  –  " if value is None else f"{value:.3f}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
