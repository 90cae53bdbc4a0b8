"""A layer from another package, which counts per hour the tensor bytes between server and sites, and writes them to a
file.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from medsilo.extend import Channel, Layer, Plan, StudyMessage


class HourlyBytes(Layer):
    name: Literal["hourly-bytes"] = "hourly-bytes"
    file: str

    def server(self, inner: Channel, plan: Plan) -> Channel:
        return CountingChannel(inner, Path(self.file))


class CountingChannel:
    def __init__(self, inner: Channel, file: Path) -> None:
        self.inner, self.file, self.bytes = inner, file, Counter[str]()

    def ask(
        self,
        sites: Sequence[str],
        outgoing: Callable[[str], StudyMessage],
        receive: Callable[[str, StudyMessage], None],
        timeout: float,
    ) -> Mapping[str, Any]:
        def going(site: str) -> StudyMessage:
            return self._count(outgoing(site))

        def coming(site: str, reply: StudyMessage) -> None:
            receive(site, self._count(reply))

        try:
            return self.inner.ask(sites, going, coming, timeout)
        finally:
            self.file.write_text(json.dumps(self.bytes))

    def _count(self, message: StudyMessage) -> StudyMessage:
        self.bytes[time.strftime("%Y-%m-%dT%H")] += message.size()
        return message
