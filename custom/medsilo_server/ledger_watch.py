"""Detect at the server that a hospital's privacy ledger was replaced by an older copy."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from medsilo.core.errors import reading
from medsilo.core.files import write_json
from medsilo.exchange.channel import Channel, Missing, Outgoing, Receive
from medsilo.runs.messages import MOST_HEADS, MOST_WARNINGS, LedgerHead, SiteWarning, StudyMessage


class LedgerWatch:
    """A channel that stores the last entry of each hospital's privacy ledger, and adds this entry to each request.

    The entries stay stored when a study ends, so that later studies also use the entries. A hospital rejects the
    request if its ledger is older than the entry in the request. If a hospital with an older ledger answers
    nevertheless, the server adds a warning to the answer.
    """

    def __init__(self, inner: Channel, file: Path) -> None:
        """Wrap a channel.

        Args:
            file: The file that contains the last ledger entries for all studies. If two studies write this file at the
                same time, the file may lack an entry until the hospital's next answer.
        """
        self.inner, self.file = inner, file

    def ask(self, sites: Sequence[str], outgoing: Outgoing, receive: Receive, timeout: float) -> Mapping[str, Missing]:
        def going(site: str) -> StudyMessage:
            message, known = outgoing(site), self._known().get(site, [])
            told = {"ledgers": [head.model_dump() for head in known]} if known else {}
            return replace(message, facts={**message.facts, **told})

        def coming(site: str, reply: StudyMessage) -> None:
            told = reply.facts.get("ledger") if isinstance(reply.facts, dict) else None
            if told is None:
                return receive(site, reply)
            head = LedgerHead.received(told)
            if warning := self._gone_back(site, head):
                others = reply.facts.get("warnings")
                own = others[: MOST_WARNINGS - 1] if isinstance(others, list) else []
                reply = replace(reply, facts={**reply.facts, "warnings": [*own, warning.model_dump(mode="json")]})
            receive(site, reply)
            known = self._known()
            others = [own for own in known.get(site, []) if own.began != head.began]
            known[site] = [*others, head][-MOST_HEADS:]
            write_json(self.file, {site: [own.model_dump() for own in heads] for site, heads in known.items()})

        return self.inner.ask(sites, going, coming, timeout)

    def _gone_back(self, site: str, head: LedgerHead) -> SiteWarning | None:
        known = self._known().get(site, [])
        before = next((own for own in known if own.began == head.began), None)
        if before and (head.lines < before.lines or (head.lines == before.lines and head.hash != before.hash)):
            return SiteWarning(kind="ledger back", numbers=(before.lines, head.lines))
        if known and not before:
            return SiteWarning(kind="ledger unknown", numbers=(known[-1].lines,))
        return None

    def _known(self) -> dict[str, list[LedgerHead]]:
        if not self.file.exists():
            return {}
        with reading(f"the heads of ledgers in {self.file.name}"):
            told = json.loads(self.file.read_text("utf-8"))
            return {site: [LedgerHead.received(head) for head in heads] for site, heads in told.items()}
