"""What a hospital and the server tell of themselves, as typed models: readiness, and where numbers come from."""

from typing import Annotated, Any, Literal

from pydantic import Field

from medsilo.runs.fields import Amount, Count, RecordPart, Seed, Text


class Readiness(RecordPart):
    """A hospital's answer to a canary, a part at a time; nothing of it says what is in its data."""

    data: Literal["readable", "not readable", "not set"] | None = Field(
        None, description="whether its own data can be read: their first file opens"
    )
    device: Annotated[Text, Field(max_length=400)] = Field(
        "", description="`cpu` or `cuda`, or why its settings' device is not there"
    )
    gpus_promised: Count | None = Field(None, description="GPUs that its `resources.json` promises")
    gpus: Count | None = Field(None, description="GPUs that are there")
    memory: Count | None = Field(None, description="GiB of memory that are free on its device")
    disk: Count | None = Field(None, description="GiB that are free where its studies are kept")
    line: Amount | None = Field(None, description="bytes per second to it, measured by the server")


class Package(RecordPart):
    """The version and hash of a package whose code ran."""

    version: str | None = None
    hash: str | None = None


class Provenance(RecordPart):
    """provenance.json: where a run's numbers come from."""

    packages: dict[Text, Package] = Field({}, description="package whose code ran → its `version` and `hash`")
    plan_hash: Text | None = Field(None, description="SHA-256 of the resolved plan")
    seed: Seed | None = Field(None, description="the plan's seed")
    protocol: Text | None = Field(None, description="what the plan's numbers follow")
    started: Text | None = Field(None, description="when the run began, UTC")
    python: Text | None = Field(None, description="Python's version")
    platform: Text | None = Field(None, description="operating system and processor")
    versions: dict[str, Text] = Field({}, description="library → version")
    device: Text | None = Field(None, description="of a site: what it trains on, and how exactly that computes")

    @property
    def code(self) -> dict[str, dict[str, Any]]:
        """Version and hash of each package, as a plan says them of what is installed."""
        return {name: package.model_dump() for name, package in self.packages.items()}

    def as_read(self) -> dict[str, Any]:
        """Return the keys that the file has."""
        return self.model_dump(mode="json", exclude_unset=True)
