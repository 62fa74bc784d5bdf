"""Replicas that do the same at the same time are simulated once.

Units, channels and cards are coloured, equal ones alike, and the colouring is refined until units
of one colour see the same colours around them. What a unit does depends on what its channels
deliver, what a channel does on its ends and its cards, and what a card does on how many flows of
which colour it carries; so units of one colour run alike for the whole step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TypeVar

from dapple.costs.network import Ring, Route
from dapple.costs.pipeline import Channel, GradientSum, PipelineCosts

T = TypeVar("T")


def merge_equal_replicas(costs: PipelineCosts) -> PipelineCosts:
    """The same pipeline with one unit for all replicas that run alike; its step is as long.

    Units keep the figures of the first replica of their colour, and routes count how many flows
    like them a card carries. The result is for times only: ranks and rows of the others are gone.
    """
    if costs.num_units == costs.num_stages:
        return costs
    colours = _Colours(costs)
    if not colours.refine():
        return costs
    return _merged(costs, colours)


class _Colours:
    """Colours of units, channels, ring flows and contended cards."""

    def __init__(self, costs: PipelineCosts) -> None:
        self.costs = costs
        leads = _leads(costs)
        own = costs.forward, costs.backward, costs.weights, costs.optimizer, leads
        self.units = _numbered(zip(costs.stage_of, *own, strict=True))
        self.kinds = _numbered(
            (*c.route[:2], *c.back[:2], c.forward_bytes, c.backward_bytes) for c in costs.channels
        )
        self.rings = [(n, r) for n, part in enumerate(costs.sums) for r in part.ring.between]
        bandwidths = costs.contended.values()
        self.cards = dict(zip(costs.contended, _numbered(bandwidths), strict=True))
        self.channels: list[int] = []
        self.flows: list[int] = []

    def refine(self) -> bool:
        """Refine to the end; False as soon as every unit has a colour of its own."""
        while True:
            before = (len(set(self.units)), len(set(self.cards.values())))
            if before[0] == self.costs.num_units:
                return False
            self._colour_channels()
            self._colour_units()
            self._colour_cards()
            if before == (len(set(self.units)), len(set(self.cards.values()))):
                return True

    def _colour_channels(self) -> None:
        units, cards = self.units, self.cards
        self.channels = _numbered(
            (kind, units[c.source], units[c.target], *map(cards.get, _cards_of(c)))
            for kind, c in zip(self.kinds, self.costs.channels, strict=True)
        )
        self.flows = _numbered(
            (number, cards.get(route.out_card), cards.get(route.in_card))
            for number, route in self.rings
        )

    def _colour_units(self) -> None:
        around: list[set[int]] = [set() for _ in self.units]
        for colour, channel in zip(self.channels, self.costs.channels, strict=True):
            around[channel.source].add(colour)
            around[channel.target].add(colour)
        self.units = _numbered(zip(self.units, map(frozenset, around), strict=True))

    def _colour_cards(self) -> None:
        if self.cards:
            users = self.card_users()
            keys = [(c, frozenset(users[card].items())) for card, c in self.cards.items()]
            self.cards = dict(zip(self.cards, _numbered(keys), strict=True))

    def card_users(self) -> dict[int, Counter[tuple[str, int]]]:
        """Per card the number of flows of each colour, by their way: there, back, ring."""
        users: dict[int, Counter[tuple[str, int]]] = {card: Counter() for card in self.cards}
        for colour, channel in zip(self.channels, self.costs.channels, strict=True):
            for way, card in zip(_WAYS, _cards_of(channel), strict=True):
                if card in users:
                    users[card][way, colour] += 1
        for colour, (_, route) in zip(self.flows, self.rings, strict=True):
            for way, card in (("ring out", route.out_card), ("ring in", route.in_card)):
                if card in users:
                    users[card][way, colour] += 1
        return users


def _leads(costs: PipelineCosts) -> list[tuple[float, ...]]:
    """Per unit, how long before its end each bucket of its gradients is complete."""
    leads: list[tuple[float, ...]] = [() for _ in costs.stage_of]
    for part in costs.sums:
        if part.leads:
            (stage,) = part.stages
            for unit, lead in zip(costs.units_of[stage], part.leads, strict=True):
                leads[unit] += (lead,)
    return leads


_WAYS = ("out", "in", "back out", "back in")


def _cards_of(channel: Channel) -> tuple[int, int, int, int]:
    route, back = channel.route, channel.back
    return route.out_card, route.in_card, back.out_card, back.in_card


def _numbered(keys: Iterable[Hashable]) -> list[int]:
    """Equal keys get equal numbers, in the order in which they first appear."""
    seen: dict[Hashable, int] = {}
    return [seen.setdefault(key, len(seen)) for key in keys]


def _merged(costs: PipelineCosts, colours: _Colours) -> PipelineCosts:
    firsts = _firsts(colours.units)
    kept = set(firsts)
    position = {colours.units[unit]: number for number, unit in enumerate(firsts)}
    users = colours.card_users()
    first_card = {colours.cards[card]: card for card in reversed(list(colours.cards))}

    def route(old: Route, way: str, colour: int) -> Route:
        out_card, in_card = (_first_of(card, colours, first_card) for card in old[2:4])
        return old._replace(
            out_card=out_card,
            in_card=in_card,
            out_count=users[old.out_card][f"{way}out", colour] if old.out_card in users else 1,
            in_count=users[old.in_card][f"{way}in", colour] if old.in_card in users else 1,
        )

    def channel(number: int) -> Channel:
        old, colour = costs.channels[number], colours.channels[number]
        return old._replace(
            source=position[colours.units[old.source]],
            target=position[colours.units[old.target]],
            route=route(old.route, "", colour),
            back=route(old.back, "back ", colour),
        )

    first_flows: dict[int, list[int]] = {}
    for flow in _firsts(colours.flows):
        first_flows.setdefault(colours.rings[flow][0], []).append(flow)

    def ring(number: int, old: Ring) -> Ring:
        mine = first_flows.get(number, ())
        routes = (route(colours.rings[f][1], "ring ", colours.flows[f]) for f in mine)
        return old._replace(between=tuple(routes))

    def part(number: int, old: GradientSum) -> GradientSum:
        leads = old.leads
        if leads:
            units = costs.units_of[old.stages[0]]
            leads = tuple(lead for unit, lead in zip(units, leads, strict=True) if unit in kept)
        return old._replace(ring=ring(number, old.ring), leads=leads)

    stage_of = tuple(costs.stage_of[unit] for unit in firsts)
    return dataclasses.replace(
        costs,
        stage_of=stage_of,
        units_of=tuple(
            tuple(u for u, stage in enumerate(stage_of) if stage == s)
            for s in range(costs.num_stages)
        ),
        channels=tuple(channel(number) for number in _firsts(colours.channels)),
        sums=tuple(part(number, old) for number, old in enumerate(costs.sums)),
        replica_of=_picked(costs.replica_of, firsts),
        device_of=_picked(costs.device_of, firsts),
        rows=_picked(costs.rows, firsts),
        weights=_picked(costs.weights, firsts),
        forward=_picked(costs.forward, firsts),
        backward=_picked(costs.backward, firsts),
        recompute=_picked(costs.recompute, firsts),
        optimizer=_picked(costs.optimizer, firsts),
    )


def _picked(values: tuple[T, ...], numbers: list[int]) -> tuple[T, ...]:
    return tuple(values[number] for number in numbers)


def _firsts(colours: list[int]) -> list[int]:
    """The first item of each colour, in order."""
    seen: dict[int, int] = {}
    for number, colour in enumerate(colours):
        seen.setdefault(colour, number)
    return list(seen.values())


def _first_of(card: int, colours: _Colours, first_card: dict[int, int]) -> int:
    return first_card[colours.cards[card]] if card in colours.cards else card
