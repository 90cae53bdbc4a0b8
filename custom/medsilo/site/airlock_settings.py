"""Define a hospital's limits on a lead's training script."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from medsilo.core.section import Section

Airlock = Literal["off", "wanted", "required"]
MiB = 1 << 20
Variable = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]{0,63}$")]
# Prefixes of environment variables that can make a program load code, or that the isolated process sets.
LOADERS = ("LD_", "PYTHON", "MEDSILO_", "PATH", "HOME", "TMPDIR")


class RoomSettings(Section):
    """A hospital's settings for an isolated training script: environment variables and limits."""

    studies: bool = Field(
        False,
        description="whether medsilo's own studies, and not only scripts, read images and train in an isolated process",
    )
    reads: tuple[Path, ...] = Field(
        (), max_length=100, description="folders and files that a script may read, besides the data set's folder"
    )
    devices: tuple[Path, ...] = Field(
        (), max_length=100, description="device nodes that a script may use, such as /dev/nvidia0 and /dev/nvidiactl"
    )
    variables: dict[Variable, Annotated[str, Field(max_length=1000)]] = Field(
        {}, max_length=50, description="environment variables that a script gets in addition to a short fixed list"
    )
    scratch: int = Field(
        1024, ge=16, le=1 << 24, description="MiB of temporary files, in memory, that a script may write"
    )
    processes: int = Field(512, ge=16, le=1 << 20, description="processes and threads that a script may have at once")
    hours: float = Field(24.0, gt=0, le=10_000, description="hours that a script may take for one answer")

    @field_validator("reads", "devices")
    @classmethod
    def _whole_paths(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        if odd := [path for path in paths if not path.is_absolute() or path == Path("/") or ".." in path.parts]:
            raise ValueError(f"{odd[0]} is not an absolute path below /; write the path from / on")
        return paths

    @field_validator("variables")
    @classmethod
    def _no_loaders(cls, variables: dict[str, str]) -> dict[str, str]:
        if odd := [name for name in variables if name.startswith(LOADERS)]:
            raise ValueError(f"{odd[0]} is set by the isolated process itself; leave it out")
        return variables


class BorderSettings(Section):
    """A hospital's limits on a training script's answers."""

    norm: float | None = Field(
        None,
        gt=0,
        le=1e9,
        description="largest L2 norm of an update; medsilo rejects a larger update. null: any",
    )
    clip: float | None = Field(
        None, gt=0, le=1e9, description="largest L2 norm of an update; a larger update is scaled down to this norm"
    )
    bfloat16: bool = Field(
        False,
        description="whether updates are rounded to bfloat16, which halves the information that an update can carry",
    )
    noise: float | None = Field(
        None, gt=0, le=1000, description="standard deviation of Gaussian noise on an update, as a multiple of `clip`"
    )
    digits: int = Field(3, ge=1, le=9, description="significant digits of disclosed scores and losses")

    @model_validator(mode="after")
    def _clips_before_noise(self) -> Self:
        if self.noise is not None and self.clip is None:
            raise ValueError("noise is a multiple of clip; give clip, too")
        return self

    @property
    def changes(self) -> bool:
        """True if clipping, noise or rounding changes a script's update before the update leaves the hospital."""
        return self.clip is not None or self.bfloat16
