"""Errors that a person can act on: one line that says what is wrong, where, and what to do."""


class MedsiloError(Exception):
    """Wrong input or a promise that could not be kept. Its text is safe to show anywhere.

    The text may leave a hospital (it becomes the reason of a refusal), so it never holds a path of a
    hospital's disk, a file name or a patient's identifier. What only the hospital may read goes into `private`.
    """

    def __init__(self, message: str, private: str = "") -> None:
        super().__init__(message)
        self.private = private


class PlanError(MedsiloError):
    """The plan is wrong: names the key, the value and the fix."""


class DataError(MedsiloError):
    """A site's data are absent or unusable."""


class Refused(MedsiloError):
    """A parcel that must not enter a sum, with the reason."""


class Died(Refused):
    """What was to answer died over it: another one is there, and may answer when it is asked again."""


class ParticipationError(MedsiloError):
    """Fewer sites than the plan agreed on."""


class Aborted(MedsiloError):
    """The run was told to stop."""


class Unreachable(MedsiloError):
    """The server does not answer; it may later."""
