"""The soak's own parts: what it draws, and what it calls a leak."""

from itertools import islice

from tests.conftest import SITES
from tests.secure.soak import GENTLE, ROUGH, WARM, CaseFacts, events, growths


def test_a_seed_draws_the_same_events() -> None:
    one, again, other = (list(islice(events(seed, 0, SITES), 200)) for seed in (7, 7, 8))
    assert one == again != other
    assert {event.kind for event in one} == set(ROUGH) and {event.site for event in one} == set(SITES)
    gentle = {event.kind for event in islice(events(7, 1, SITES), 200)}
    assert gentle == set(GENTLE)


def life(pid: int, *rss: float, handles: int = 0, pool: int = 0) -> list[CaseFacts]:
    """A process that was looked at every minute, with so many handles more each time, and a pool of threads that grows
    to that size and shrinks again."""
    return [
        CaseFacts(minute, 0, "localhost", "job", pid, held, 20 + handles * minute, 9 + pool * minute % 50)
        for minute, held in enumerate(rss)
    ]


def test_growth_counts_after_the_start_and_not_for_a_moment() -> None:
    start = [100.0, 200.0, 250.0, 290.0, 300.0]
    assert len(start) == WARM
    steady = life(1, *start, *[300.0, 300.0, 390.0, 300.0] * 5, pool=10)
    growing = life(2, *start, *(300.0 + 4 * minute for minute in range(20)))
    leaking = life(3, *start, *[300.0] * 20, handles=1)
    short = life(4, *start, 900.0)
    found = {one.pid: one for one in growths([*steady, *growing, *leaking, *short])}
    assert found.keys() == {1, 2, 3}
    assert not found[1].leaks and found[1].rss == 0
    assert found[2].leaks and found[2].rss == 60 and found[2].handles == 0
    assert found[3].leaks and found[3].rss == 0 and found[3].handles == 15
