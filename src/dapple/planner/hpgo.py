"""The authors' released search, HPGO 0.9.2: pure DP, straight, and every two-stage split.

Source: the package HPGO 0.9.2 of the paper's authors (BSD-3-Clause), its conductor
`AsyncOrchestrate` and score `sync_pipeline_speedup_analytical`; written anew from its formulas.
It is not the recursion T_PL of DAPPLE, section 3: its dynamic programme minimises the slowest
block, and because a replicated stage is taken to split perfectly and to reduce its gradients for
free there, one stage on all devices always wins it. What is left are three families:

    data parallel   one stage on i * floor(G / i) devices, i = 2..G
    straight        two stages on half the devices each, and one stage per device
    two stages      every cut x every number of devices, placed Fresh, Append or Scatter First

Nor is the score the paper's equations 1 and 2. With block t = slowest stage or transfer, T = the
time of all layers, and a family's replication r, M = global batch / (r x least micro-batch):

    L = (M - 1) t + T / (r M) + sum_i transfer_i / (r M) + max(0, max_i (AllReduce_i - i t))

A transfer counts once for activations and gradients, which pass each other (full duplex); the
straight family's balance counts it twice. The original has a slip: a stage's AllReduce also takes
the parameters of the layer behind the stage (for VGG-19 on single-device machines this moves the
cut from MaxPool2d_5, before the first FC layer, to Conv2d_5_1). We look at both, with the slip and
without.

Network: a fixed rate for every flow, nothing is shared. Into one machine, the senders of other
machines send their shares through one flow; to several machines, everything moves at AllReduce
bandwidth.

Told the same chain, `released_search` comes to the package's plans and, to rounding, scores
(benchmarks/planner/released.py; tests/planner/test_published.py).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dapple.cluster import Cluster, Link
from dapple.costs import Network
from dapple.planner.layout import Layout
from dapple.planner.placement import place
from dapple.planner.problem import Problem
from dapple.planner.published import layer_costs
from dapple.planner.tables import Ints
from dapple.planner.traffic import Devices, Floats

_MARKS = 256
"""Beyond, only so many cuts are looked at."""
_INSIDE = Link(bandwidth=25e9, allreduce_bandwidth=4 * 25e9)
_OUTSIDE = {"flow_bandwidth": 1.0e9, "allreduce_bandwidth": 3.0e9}


@dataclass(frozen=True)
class BatchCosts:
    """A model on one device, for the whole global batch, at n + 1 places where it may be cut.

    Attributes:
        seconds: shape (n + 1,), prefix sums of forward and backward.
        parameter_bytes: shape (n + 1,), prefix sums.
        crossing_bytes: shape (n + 1,), activations over each cut.
        rows: the global batch size.
        slip: whether a stage's AllReduce takes the layer behind it too, as in the original.
    """

    seconds: Floats
    parameter_bytes: Floats
    crossing_bytes: Floats
    rows: int
    slip: bool = True

    @property
    def reduced_until(self) -> Floats:
        """Parameter bytes up to where a stage's AllReduce counts them, by the stage's end."""
        until = self.parameter_bytes
        return np.append(until[1:], until[-1]) if self.slip else until


@dataclass(frozen=True, order=True)
class Scored:
    """A plan with its score L in seconds; cuts are indices into the costs' places."""

    seconds: float
    cuts: tuple[int, ...]
    devices: tuple[Devices, ...]


def hpgo(problem: Problem, micro_batches: int) -> Iterator[Layout]:
    """The released search's choices: with its least micro-batch of 1 row and with ours.

    The plan is HPGO's; how many micro-batches it runs in is up to the caller.
    """
    one, rows = layer_costs(problem, micro_batches, _MARKS), problem.global_batch_size
    largest = problem.tables(micro_batches).first_rows
    whole = BatchCosts(
        one.seconds * (rows / largest),
        one.parameter_bytes,
        one.activation_bytes * (rows / largest),
        rows,
    )
    chains = _balanced(whole, problem.cluster)
    plans = {
        _best(costs, problem.cluster, chains, least)
        for costs in (whole, dataclasses.replace(whole, slip=False))
        for least in (1, largest)
    }
    for cuts, devices in sorted({(plan.cuts, plan.devices) for plan in plans}):
        yield Layout(tuple(int(one.places[c]) for c in cuts), devices, micro_batches)


def released_network(cluster: Cluster) -> Cluster:
    """The cluster's machines with the network figures that are built into HPGO 0.9.2."""
    groups = []
    for group in cluster.machines:
        outside = group.outside.model_copy(update=_OUTSIDE) if group.outside else None
        groups.append(group.model_copy(update={"inside": _INSIDE, "outside": outside}))
    return cluster.model_copy(update={"machines": tuple(groups)})


def released_search(costs: BatchCosts, cluster: Cluster, least_micro_batch: int = 1) -> Scored:
    """The plan with the best score.

    Args:
        costs: the model.
        cluster: G devices.
        least_micro_batch: rows of a micro-batch on one device, HPGO's `min_micro_batch_size`.
    """
    return _best(costs, cluster, _balanced(costs, cluster), least_micro_batch)


def _best(costs: BatchCosts, cluster: Cluster, chains: Sequence[_Balanced], least: int) -> Scored:
    found = [_data_parallel(costs, cluster, least)]
    found += [_straight(costs, chain, least) for chain in chains]
    found += _two_stages(costs, cluster, least)
    return min(found)


def _data_parallel(costs: BatchCosts, cluster: Cluster, least: int) -> Scored:
    total, size = float(costs.seconds[-1]), float(costs.parameter_bytes[-1])
    scores = []
    for replicas, devices, reduce_per_byte in _replicated(cluster):
        count = _micro_batches(costs, replicas, least)
        block = total / len(devices) / count
        seconds = (count - 1) * block + total / replicas / count + size * reduce_per_byte
        scores.append((seconds, devices))
    seconds, devices = min(scores)
    return Scored(seconds, (0, len(costs.seconds) - 1), (devices,))


@functools.lru_cache(maxsize=8)
def _replicated(cluster: Cluster) -> list[tuple[int, Devices, float]]:
    """Every data parallelism: its r, its devices, and AllReduce seconds for each byte."""
    network, most = _network(cluster), cluster.num_devices
    found = []
    for ways in range(min(2, most), most + 1):
        devices = tuple(range(ways * (most // ways)))
        found.append((most // ways, devices, network.ring(devices).inside_seconds_per_byte))
    return found


@dataclass(frozen=True)
class _Chain:
    """Equally replicated stages on consecutive devices.

    Of HPGO's placements we take the one that crosses machines least.

    Attributes:
        devices: of each stage.
        links: seconds for each byte that a stage sends to the next, shape (S - 1,).
        reduces: AllReduce seconds for each byte, shape (S,).
    """

    devices: tuple[Devices, ...]
    links: Floats
    reduces: Floats


@functools.lru_cache(maxsize=8)
def _chains(cluster: Cluster, places: int) -> list[_Chain]:
    """Those of the straight family, for a model that may be cut at so many places."""
    network, count = _network(cluster), cluster.num_devices
    shapes = {(min(places, count), 1)}
    if places > 1 and count > 2 and count % 2 == 0:
        shapes.add((2, count // 2))
    found = []
    for stages, replicas in sorted(shapes):
        devices = [tuple(range(s * replicas, (s + 1) * replicas)) for s in range(stages)]
        links = [_transfer(network, a, b) for a, b in itertools.pairwise(devices)]
        reduces = [network.ring(part).inside_seconds_per_byte for part in devices]
        found.append(_Chain(tuple(devices), np.array(links), np.array(reduces)))
    return found


_Balanced = tuple[_Chain, tuple[int, ...], float]
"""A chain cut so that the slowest block of the whole batch is fastest, and that block's seconds."""


def _balanced(costs: BatchCosts, cluster: Cluster) -> list[_Balanced]:
    chains = _chains(cluster, len(costs.seconds) - 1)
    return [(chain, *_balance(costs, chain)) for chain in chains]


def _straight(costs: BatchCosts, balanced: _Balanced, least: int) -> Scored:
    chain, cuts, slowest = balanced
    replicas = len(chain.devices[0])
    count = _micro_batches(costs, replicas, least)
    block = slowest / count
    ends = np.array(cuts)
    moved = (costs.crossing_bytes[ends[1:-1]] * chain.links).sum()
    held = costs.reduced_until[ends[1:]] - costs.parameter_bytes[ends[:-1]]
    late = (held * chain.reduces - np.arange(len(held)) * block).max()
    fill = (costs.seconds[-1] + moved) / replicas / count
    seconds = (count - 1) * block + fill + max(0.0, late)
    return Scored(float(seconds), cuts, chain.devices)


def _balance(costs: BatchCosts, chain: _Chain) -> tuple[tuple[int, ...], float]:
    """Cuts with the least slowest block, twice the activations' transfers included."""
    places = len(costs.seconds) - 1
    stage = (costs.seconds[None, :] - costs.seconds[:, None]) / len(chain.devices[0])
    stage = np.where(np.tri(places + 1, dtype=np.bool_), np.inf, stage)
    best, starts = stage[0], []
    for link in chain.links:
        before = np.maximum(best, 2 * costs.crossing_bytes * link)
        worst = np.maximum(before[:, None], stage)
        starts.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    cuts = [places]
    for start in reversed(starts):
        cuts.append(int(start[cuts[-1]]))
    return (0, *reversed(cuts)), float(best[places])


@dataclass(frozen=True)
class _Pairs:
    """Every way to give all G devices to two stages. Shape (P, 1) each."""

    devices: tuple[tuple[Devices, Devices], ...]
    widths: Ints
    transfer: Floats
    reduces: tuple[Floats, Floats]


def _two_stages(costs: BatchCosts, cluster: Cluster, least: int) -> Iterator[Scored]:
    if len(costs.seconds) < 3 or cluster.num_devices < 2:
        return
    pairs, count = _pairs(cluster), _micro_batches(costs, 1, least)
    before, total = costs.seconds[None, 1:-1], costs.seconds[-1]
    moved = costs.crossing_bytes[None, 1:-1] * pairs.transfer
    behind = (total - before) / (cluster.num_devices - pairs.widths)
    block = np.maximum(np.maximum(before / pairs.widths, behind), moved) / count
    held = costs.parameter_bytes[None, 1:-1]
    first = costs.reduced_until[None, 1:-1] * pairs.reduces[0]
    second = (costs.parameter_bytes[-1] - held) * pairs.reduces[1]
    late = np.maximum(np.maximum(first, second - block), 0.0)
    seconds = (count - 1) * block + (total + moved) / count + late
    row, column = divmod(int(seconds.argmin()), seconds.shape[1])
    cuts = (0, column + 1, len(costs.seconds) - 1)
    yield Scored(float(seconds[row, column]), cuts, pairs.devices[row])


@functools.lru_cache(maxsize=8)
def _pairs(cluster: Cluster) -> _Pairs:
    network, sizes, count = _network(cluster), cluster.machine_sizes(), cluster.num_devices
    found: dict[tuple[Devices, Devices], None] = {}
    for width in range(1, count):
        for policy in ("fresh", "append", "scatter"):
            first = place(policy, sizes, (), width)
            assert first is not None, "a cluster has room for fewer devices than it has"
            # What is left is one set, whichever policy takes it.
            found[first, tuple(sorted(set(range(count)).difference(first)))] = None
    rings = [[network.ring(part).inside_seconds_per_byte for part in pair] for pair in found]
    return _Pairs(
        tuple(found),
        np.array([[len(first)] for first, _ in found]),
        np.array([[_transfer(network, *pair)] for pair in found]),
        (np.array(rings)[:, :1], np.array(rings)[:, 1:]),
    )


@functools.lru_cache(maxsize=8)
def _network(cluster: Cluster) -> Network:
    return Network(cluster, "paper")


def _transfer(network: Network, senders: Devices, receivers: Devices) -> float:
    """Seconds for each byte that a stage sends to the next."""
    targets = {network.machine(device) for device in receivers}
    if len(targets) > 1:
        together = (*senders, *receivers)
        per_byte = network.ring(together).inside_seconds_per_byte
        return per_byte / (2 * (len(together) - 1) / len(together))
    outside = [device for device in senders if network.machine(device) not in targets]
    if not outside:
        return 1 / network.route(senders[0], receivers[0]).rate
    slowest = min(network.route(device, receivers[0]).rate for device in outside)
    return len(outside) / len(senders) / slowest


def _micro_batches(costs: BatchCosts, replicas: int, least: int) -> int:
    return max(1, costs.rows // replicas // least)
