"""What a person sees while a study runs: one line per site and round."""

from medsilo.runs.schema import Round, SiteRound


def round_lines(line: Round, rounds: int, metric: str) -> list[str]:
    """Return the lines of one round; a site that is missing says why."""
    head = f"round {line.round:>{len(str(rounds))}}/{rounds}"
    width = max(map(len, line.asked), default=0)
    lines = []
    for site in line.asked:
        own = line.sites.get(site)
        reason = line.refused.get(site) or line.lost.get(site)
        lines.append(f"{head}  {site:<{width}}  {_numbers(own, metric) if own else f'MISSING: {reason}'}")
        lines += [f"{head}  {site:<{width}}  WARNING: {warning}" for warning in line.warnings.get(site, [])]
    return lines


def _numbers(own: SiteRound, metric: str) -> str:
    return (
        f"{metric} before {_value(own.validation)}  loss {_value(own.train_loss)}  "
        f"{own.samples} cases  {own.seconds:.1f} s  up {_bytes(own.bytes_up)}  down {_bytes(own.bytes_down)}"
    )


def _value(value: float | None) -> str:
    return "  –  " if value is None else f"{value:.3f}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"
