"""What a defence costs the server: a round of real mixers under each, against the plain mean in the same run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
