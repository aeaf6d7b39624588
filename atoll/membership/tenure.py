"""A member's side: whom it obeys, and until when it may go on without being told that it is still wanted."""

from __future__ import annotations

import msgspec

from atoll.membership.events import Generation
from atoll.records import Record

__all__ = ["Tenure"]


class Tenure(Record):
    """``term``, ``coordinator``: whom it obeys; of two of one term the first it met. ``began``: the last generation that it
    knows to have started; ``promised``: the last that it was ready for. All these outlive the process, on disk: who forgets
    them could be talked into the past. ``incarnation``: counted there too, before anything is said.

    ``until_ns`` (own clock): when the lease ends. It counts from when a sign of life was *sent* that the coordinator then
    confirmed, so the coordinator, which counts from when it arrived, never believes it ended before it has; clocks need no
    common origin, only a common pace.
    """

    lease_ns: int
    incarnation: int = 0
    term: int = 0
    coordinator: str = ""
    began: Generation | None = None
    promised: Generation | None = None
    until_ns: int = 0

    def reborn(self) -> Tenure:
        """A new process reads what the last one left."""
        return msgspec.structs.replace(self, incarnation=self.incarnation + 1, until_ns=0)

    def follows(self, term: int, coordinator: str) -> bool:
        """Whether it would obey this coordinator."""
        return term > self.term or (term == self.term and self.coordinator in ("", coordinator))

    def admitted(self, term: int, coordinator: str, last: Generation | None, sent_ns: int) -> Tenure:
        """It knocked at ``sent_ns`` and was let in by a coordinator that it follows. ``last``: the last generation that began;
        whoever worked for an earlier one must not take that up again with the new lease."""
        own = self.promised or self.began
        promised = last if last and (own is None or last.number > own.number) else self.promised
        return msgspec.structs.replace(self, term=term, coordinator=coordinator, promised=promised,
                                       until_ns=sent_ns + self.lease_ns)

    def confirmed(self, term: int, coordinator: str, sent_ns: int) -> Tenure:
        """The answer to the sign of life sent at ``sent_ns``; another coordinator's does not count."""
        if (term, coordinator) != (self.term, self.coordinator):
            return self
        return msgspec.structs.replace(self, until_ns=max(self.until_ns, sent_ns + self.lease_ns))

    def ready(self, generation: Generation) -> Tenure | None:
        """The tenure under a proposed generation: from then on it works for no earlier one. None: an order of the past."""
        last = self.promised or self.began
        if generation.coordinator != self.coordinator or (last and generation.number <= last.number):
            return None
        return msgspec.structs.replace(self, promised=generation)

    def started(self, generation: Generation) -> Tenure:
        """The generation is at work (said once when it begins, and to whoever knocks): it is in, if it was ready for it."""
        return msgspec.structs.replace(self, began=generation, promised=None) if self.promised == generation else self

    def may_work(self, generation: Generation, now_ns: int) -> bool:
        """Whether what is asked in the name of ``generation`` (a step, a peer's transfer) is of now."""
        return self.began == generation and self.promised is None and now_ns < self.until_ns
