"""Which devices a stage takes: the paper's three policies and consecutive packing.

On 3 machines of 8 with devices 0-2 and 8-12 taken (DAPPLE, section 4), six more are

    fresh        16 17 18 19 20 21      an unused machine: its AllReduce stays inside
    append        3  4  5  6  7 13      the machines already partly used: no fragments are left
    scatter       3  4  5 13 14 15      equally from the used machines: neighbours share a machine
    consecutive   3  4  5  6  7 13      the lowest free numbers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

Policy = Literal["consecutive", "fresh", "append", "scatter"]
POLICIES: tuple[Policy, ...] = ("consecutive", "fresh", "append", "scatter")


def place(
    policy: Policy, machine_sizes: Sequence[int], taken: Iterable[int], count: int
) -> tuple[int, ...] | None:
    """The devices that a policy gives to the next stage.

    Where the machines that a policy prefers don't suffice, the rest comes from the others, in the
    order of their numbers.

    Args:
        policy: one of `POLICIES`.
        machine_sizes: devices of each machine, in order.
        taken: devices that earlier stages hold.
        count: devices wanted, at least 1.

    Returns:
        Device numbers, ascending; None: fewer than `count` are free.
    """
    occupied = frozenset(taken)
    free: list[list[int]] = []
    first = 0
    for size in machine_sizes:
        free.append([d for d in range(first, first + size) if d not in occupied])
        first += size
    if count > sum(map(len, free)):
        return None
    used = [m for m, size in enumerate(machine_sizes) if len(free[m]) < size]
    fresh = [m for m, size in enumerate(machine_sizes) if len(free[m]) == size]
    if policy == "scatter":
        groups = [used, fresh] if used else [fresh]
        return tuple(sorted(_scatter(free, groups, count)))
    orders = {"consecutive": sorted(used + fresh), "fresh": fresh + used, "append": used + fresh}
    in_order = [device for machine in orders[policy] for device in free[machine]]
    return tuple(sorted(in_order[:count]))


def placements(
    machine_sizes: Sequence[int], taken: Iterable[int], count: int
) -> list[tuple[int, ...]]:
    """The different device sets that the policies give, in the order of `POLICIES`."""
    occupied = frozenset(taken)
    found = (place(policy, machine_sizes, occupied, count) for policy in POLICIES)
    return list(dict.fromkeys(devices for devices in found if devices is not None))


def _scatter(free: list[list[int]], groups: list[list[int]], count: int) -> list[int]:
    # One device from each machine in turn; the next group only once the first has none left.
    chosen: list[int] = []
    for group in groups:
        for turn in range(max((len(free[m]) for m in group), default=0)):
            for machine in group:
                if len(chosen) < count and turn < len(free[machine]):
                    chosen.append(free[machine][turn])
    return chosen
