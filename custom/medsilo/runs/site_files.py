"""Define models of a hospital's readiness for a study, and of a run's provenance."""

from typing import Annotated, Any, Literal

from pydantic import Field

from medsilo.runs.fields import Amount, Count, RecordPart, Seed, Text


class Readiness(RecordPart):
    """A hospital's readiness, which it reports in a canary study; it contains no information from the data."""

    data: Literal["readable", "not readable", "not set"] | None = Field(
        None, description="whether the first file of the hospital's data can be read"
    )
    code: Literal["none", "approved", "any"] | None = Field(
        None,
        description="which jobs may run their own code at the hospital: none, jobs whose code it approved, or any job",
    )
    device: Annotated[Text, Field(max_length=400)] = Field(
        "",
        description="`cpu` or `cuda`, or the reason why the device in the hospital's settings is not available",
    )
    gpus_promised: Count | None = Field(None, description="number of GPUs in the hospital's `resources.json`")
    gpus: Count | None = Field(None, description="number of available GPUs")
    memory: Count | None = Field(None, description="GiB of free memory on the hospital's device")
    disk: Count | None = Field(None, description="GiB of free disk space for studies")
    line: Amount | None = Field(
        None, description="bytes per second that the network transfers from the server to the hospital"
    )


class Package(RecordPart):
    version: str | None = None
    hash: str | None = None


class Provenance(RecordPart):
    """The content of provenance.json: versions, plan and seed of a run."""

    packages: dict[Text, Package] = Field(
        {}, description="package whose code ran → `version` and `hash` of the package"
    )
    plan_hash: Text | None = Field(None, description="SHA-256 of the resolved plan")
    seed: Seed | None = Field(None, description="the plan's seed")
    protocol: Text | None = Field(
        None, description="whether the plan follows the `paper`, the authors' `released-code`, or neither (`default`)"
    )
    started: Text | None = Field(None, description="when the run began, UTC")
    python: Text | None = Field(None, description="Python's version")
    platform: Text | None = Field(None, description="operating system and processor")
    versions: dict[str, Text] = Field({}, description="library → version")
    device: Text | None = Field(None, description="at a site: the device and the numerical precision of training")

    @property
    def code(self) -> dict[str, dict[str, Any]]:
        """The version and hash of each package, in the format of a plan."""
        return {name: package.model_dump() for name, package in self.packages.items()}

    def as_read(self) -> dict[str, Any]:
        """Return only the values that provenance.json contained."""
        return self.model_dump(mode="json", exclude_unset=True)
