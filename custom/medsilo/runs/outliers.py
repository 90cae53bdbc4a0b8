"""Find sites whose updates are outliers, and describe each of these sites in a sentence.

The server aggregates the updates of outliers, too.

A site's update is an outlier in a round in each of these cases:

- The update points away: the other sites agree, but the cosine between the update and the mean of their updates is
  below AWAY.
- The update is long: its norm is more than LONG times the median norm of the other updates.
- The update has a large weight: its share of the mean exceeds HEAVY, or MUCH times the median share of the other sites.

Lengths and weights are compared only if at least two other sites have answered. The other sites agree if the mean
cosine over pairs of their updates exceeds AGREE + DOUBT / pairs. This threshold is higher for few pairs, because their
mean is uncertain. A site is an outlier if its updates are outliers in at least FEWEST rounds, and in more than the
fraction OFTEN of its rounds.
"""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from medsilo.runs.rounds import Round

AWAY, AGREE, DOUBT, LONG, HEAVY, MUCH = -0.2, 0.1, 0.2, 10.0, 0.75, 100.0
FEWEST, OFTEN = 3, 0.5
ASK = "ask what differs there before you trust this model"
# Tests one site's update in one round. Returns the cosine, relative length or share that makes the update an outlier,
# or None.
Sign = Callable[[Round, str, str], float | None]


def standing_out(rounds: Sequence[Round]) -> dict[str, list[str]]:
    """Map each site that is an outlier to the lines that describe it."""
    sites = sorted({site for line in rounds for site in line.sites})
    found = {site: list(_lines(rounds, site)) for site in sites}
    return {site: lines for site, lines in found.items() if lines}


def _lines(rounds: Sequence[Round], site: str) -> Iterable[str]:
    own = [line for line in rounds if site in line.sites]
    groups = sorted({group for line in own for group in line.sites[site].updates})
    for sign, words in ((_away, _pointing_away), (_long, _longer)):
        most = max((_counting(own, site, group, sign) for group in groups), key=len, default=[])
        if _often(most, own):
            yield f"{site}'s updates {words(most, len(own))}; {ASK}"
    shares = _counting(own, site, "", _heavy)
    if _often(shares, own):
        yield f"{site} makes up {median(shares):.0%} of the mean, by the number of cases that it gives; {ASK}"


def _counting(rounds: Sequence[Round], site: str, group: str, sign: Sign) -> list[float]:
    return [value for line in rounds if (value := sign(line, site, group)) is not None]


def _often(values: Sequence[float], rounds: Sequence[Round]) -> bool:
    return len(values) >= FEWEST and len(values) > OFTEN * len(rounds)


def _away(line: Round, site: str, group: str) -> float | None:
    own = line.sites[site].updates.get(group)
    if own is None or own.cosine is None or own.agreement is None:
        return None
    others = sum(group in told.updates and told.updates[group].cosine is not None for told in line.sites.values()) - 1
    agree = others > 1 and own.agreement > AGREE + DOUBT / (others * (others - 1) / 2)
    return own.cosine if own.cosine < AWAY and agree else None


def _long(line: Round, site: str, group: str) -> float | None:
    norms = {name: told.updates[group].norm for name, told in line.sites.items() if group in told.updates}
    others = [norm for name, norm in norms.items() if name != site]
    if site not in norms or len(others) < 2 or not (usual := median(others)):
        return None
    return norms[site] / usual if norms[site] > LONG * usual else None


def _heavy(line: Round, site: str, group: str) -> float | None:
    shares = {name: told.share for name, told in line.sites.items() if told.share is not None}
    others = [share for name, share in shares.items() if name != site]
    if site not in shares or len(others) < 2:
        return None
    return shares[site] if shares[site] > min(HEAVY, MUCH * median(others)) else None


def _pointing_away(cosines: Sequence[float], rounds: int) -> str:
    cosine = f"{median(cosines):.2f}".replace("-", "−")
    return f"point away from the others' in {len(cosines)} of {rounds} rounds (cosine {cosine})"


def _longer(times: Sequence[float], rounds: int) -> str:
    return f"are {median(times):.3g} times as long as the others' in {len(times)} of {rounds} rounds"
