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
    >>> Command(count, "", "For a hospital's engineer", of="cases").name
    'cases count'
    """

    does: Callable[..., int]  # gets a Screen first; 0 is success
    example: str  # the arguments of one
    people: str  # the heading that it is under
    of: str = ""  # the command that it is one of several acts of

    @property
    def name(self) -> str:
        """Return what is typed."""
        return f"{self.of} {self.does.__name__.rstrip('_')}".strip().replace("_", "-")
