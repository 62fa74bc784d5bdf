"""Flows between machines that share network cards, max-min fair: docs/semantics.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_ROUNDING = 1 + 1e-12


class Flow:
    """Bytes on their way between machines.

    Attributes:
        cards: the cards it uses, each with the number of equal flows that it stands for there.
        cap: bytes per second it never exceeds.
        left: bytes left at time `since`.
        rate: bytes per second since then.
        version: counts changes of the rate; an older predicted end is void.
        done: what to do when the last byte has arrived; takes the time.
    """

    __slots__ = ("cap", "cards", "done", "left", "rate", "since", "version")

    def __init__(
        self,
        cards: tuple[tuple[int, int], ...],
        cap: float,
        size: float,
        done: Callable[[float], None],
    ) -> None:
        self.cards = cards
        self.cap = cap
        self.left = size
        self.rate = 0.0
        self.since = 0.0
        self.version = 0
        self.done = done


class _Card:
    """One network card in one direction.

    Attributes:
        wanted: bytes per second that its flows would use if nothing held them back.
    """

    __slots__ = ("bandwidth", "flows", "wanted")

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        # A dict, not a set: the order of flows decides nothing but the rounding, and must repeat.
        self.flows: dict[Flow, int] = {}
        self.wanted = 0.0

    @property
    def full(self) -> bool:
        return self.wanted > self.bandwidth * _ROUNDING


class Cards:
    """The network cards in use and the flows on them.

    A flow runs at its cap unless one of its cards is full, so only full cards, and what is
    joined through them, are ever worked out.

    Args:
        bandwidth: bytes per second of each card that flows can fill together.
    """

    def __init__(self, bandwidth: dict[int, float]) -> None:
        self._cards = {card: _Card(rate) for card, rate in bandwidth.items()}

    def join(self, flow: Flow, now: float) -> Iterable[Flow]:
        """Start a flow. Returns the flows whose rate changed, this one among them."""
        flow.since = now
        full = []
        for number, count in flow.cards:
            card = self._cards[number]
            card.flows[flow] = count
            card.wanted += flow.cap * count
            if card.full:
                full.append(number)
        if full:
            return self._share(full, now)
        flow.rate = flow.cap
        return (flow,)

    def leave(self, flow: Flow, now: float) -> Iterable[Flow]:
        """End a flow. Returns the flows whose rate changed."""
        full = []
        for number, count in flow.cards:
            card = self._cards[number]
            if card.full:
                full.append(number)
            del card.flows[flow]
            # Exactly zero again when nothing is left: rounding must not pile up over a step.
            card.wanted = card.wanted - flow.cap * count if card.flows else 0.0
        return self._share(full, now) if full else ()

    def _share(self, full: list[int], now: float) -> list[Flow]:
        flows = self._reached_from(full)
        new = []
        for flow, rate in zip(flows, self._fair_rates(flows), strict=True):
            if rate != flow.rate:
                flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
                flow.since = now
                flow.rate = rate
                new.append(flow)
        return new

    def _reached_from(self, numbers: list[int]) -> list[Flow]:
        """Flows that a change on these cards can touch, through however many full cards."""
        waiting, seen = list(numbers), set(numbers)
        found: dict[Flow, None] = {}
        while waiting:
            for flow in self._cards[waiting.pop()].flows:
                if flow not in found:
                    found[flow] = None
                    for number, _ in flow.cards:
                        if number not in seen and self._cards[number].full:
                            seen.add(number)
                            waiting.append(number)
        return list(found)

    def _fair_rates(self, flows: list[Flow]) -> list[float]:
        """Max-min fair rates by progressive filling.

        All rates rise together until a flow reaches its cap or a card is full; those flows keep
        their rate, the others rise on.
        """
        rates: dict[Flow, float] = {}
        rising = dict.fromkeys(flows)
        room: dict[int, float] = {}
        users: dict[int, int] = {}
        for flow in flows:
            for number, count in flow.cards:
                room[number] = self._cards[number].bandwidth
                users[number] = users.get(number, 0) + count
        while rising:
            share = min(room[number] / count for number, count in users.items() if count)
            lowest_cap = min(flow.cap for flow in rising)
            if lowest_cap <= share:
                fixed = [(flow, flow.cap) for flow in rising if flow.cap == lowest_cap]
            else:
                # The quotient repeats exactly, so equality finds the full cards.
                full = {n for n, count in users.items() if count and room[n] / count == share}
                fixed = [(f, share) for f in rising if any(n in full for n, _ in f.cards)]
            for flow, rate in fixed:
                rates[flow] = rate
                del rising[flow]
                for number, count in flow.cards:
                    room[number] = max(0.0, room[number] - rate * count)
                    users[number] -= count
        return [rates[flow] for flow in flows]
