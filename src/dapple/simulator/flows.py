"""Flows between machines that share network cards, max-min fair: docs/semantics.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class Flow:
    """Bytes on their way between machines.

    Attributes:
        cards: the cards it uses.
        cap: bytes per second it never exceeds.
        left: bytes left at time `since`.
        rate: bytes per second since then.
        version: counts changes of the rate; an older predicted end is void.
        done: what to do when the last byte has arrived; takes the time.
    """

    __slots__ = ("cap", "cards", "done", "left", "rate", "since", "version")

    def __init__(
        self, cards: tuple[int, ...], cap: float, size: float, done: Callable[[float], None]
    ) -> None:
        self.cards = cards
        self.cap = cap
        self.left = size
        self.rate = 0.0
        self.since = 0.0
        self.version = 0
        self.done = done


class Cards:
    """The network cards in use and the flows on them.

    Args:
        bandwidth: bytes per second of each card that flows can fill together.
    """

    def __init__(self, bandwidth: dict[int, float]) -> None:
        self._bandwidth = bandwidth
        # Dicts, not sets: the order of flows decides nothing but the rounding, and must repeat.
        self._users: dict[int, dict[Flow, None]] = {card: {} for card in bandwidth}

    def join(self, flow: Flow, now: float) -> Iterable[Flow]:
        """Start a flow. Returns the flows whose rate changed, this one among them."""
        flow.since = now
        alone = True
        for card in flow.cards:
            users = self._users[card]
            alone = alone and not users
            users[flow] = None
        if alone:
            flow.rate = min(flow.cap, *(self._bandwidth[card] for card in flow.cards))
            return (flow,)
        return self._share(self._reached_from(flow.cards), now)

    def leave(self, flow: Flow, now: float) -> Iterable[Flow]:
        """End a flow. Returns the flows whose rate changed."""
        shared = False
        for card in flow.cards:
            users = self._users[card]
            del users[flow]
            shared = shared or bool(users)
        return self._share(self._reached_from(flow.cards), now) if shared else ()

    def _reached_from(self, cards: Iterable[int]) -> list[Flow]:
        """Flows that a change on these cards can touch, through however many shared cards."""
        seen_cards = set(cards)
        waiting = list(cards)
        found: dict[Flow, None] = {}
        while waiting:
            for flow in self._users[waiting.pop()]:
                if flow not in found:
                    found[flow] = None
                    for card in flow.cards:
                        if card not in seen_cards:
                            seen_cards.add(card)
                            waiting.append(card)
        return list(found)

    def _share(self, flows: list[Flow], now: float) -> list[Flow]:
        changed = []
        for flow, rate in zip(flows, fair_rates(flows, self._bandwidth), strict=True):
            if rate != flow.rate:
                flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
                flow.since = now
                flow.rate = rate
                changed.append(flow)
        return changed


def fair_rates(flows: list[Flow], bandwidth: dict[int, float]) -> list[float]:
    """Max-min fair rates by progressive filling.

    All rates rise together until a flow reaches its cap or a card is full; those flows keep
    their rate, the others rise on.
    """
    rates: dict[Flow, float] = {}
    rising = dict.fromkeys(flows)
    room: dict[int, float] = {}
    users: dict[int, int] = {}
    for flow in flows:
        for card in flow.cards:
            room[card] = bandwidth[card]
            users[card] = users.get(card, 0) + 1
    while rising:
        share = min(room[card] / count for card, count in users.items() if count)
        lowest_cap = min(flow.cap for flow in rising)
        if lowest_cap <= share:
            fixed = [(flow, flow.cap) for flow in rising if flow.cap == lowest_cap]
        else:
            # The quotient repeats exactly, so equality finds the full cards.
            full = {c for c, count in users.items() if count and room[c] / count == share}
            fixed = [(f, share) for f in rising if any(card in full for card in f.cards)]
        for flow, rate in fixed:
            rates[flow] = rate
            del rising[flow]
            for card in flow.cards:
                room[card] = max(0.0, room[card] - rate)
                users[card] -= 1
    return [rates[flow] for flow in flows]
