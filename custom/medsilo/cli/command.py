"""A command of medsilo, which a plug-in may bring."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command: its function's name with dashes, its parameters are options, its docstring is what --help says.

    >>> from medsilo.extend import Command, Screen
    >>> def count(screen: Screen, number: int = 3) -> int:
    ...     "Count."
    ...     screen.say(str(number))
    ...     return 0
    >>> Command(count, "--number 5", "For a hospital's engineer").name
    'count'
    """

    does: Callable[..., int]  # gets a Screen first; 0 is success
    example: str  # the arguments of one
    people: str  # the heading that it stands under

    @property
    def name(self) -> str:
        """Return what is typed."""
        return self.does.__name__.replace("_", "-")
