"""Ranks as threads of one process, joined by channels that know no tags: order is all there is.

Stands for NCCL, whose messages are first in, first out for each pair and direction, and for gloo,
where a send is done only when its receive has been posted, and its tensor is read as late as
that. Makes a whole plan run in milliseconds.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from dapple.graph import BoundaryTensor, LayerGraph, StageProgram
from dapple.records import Plan
from dapple.runtime.stage import StageRunner
from dapple.runtime.trainer import Trainer
from dapple.runtime.transport import Done, Pending

TIME_LIMIT = 60.0


class Switchboard:
    """The channels between the ranks, and the sums under way."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sends: dict[Any, deque[_Message]] = defaultdict(deque)
        self.receives: dict[Any, deque[_Message]] = defaultdict(deque)
        self.sums: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict)
        self.read: Counter[Any] = Counter()
        self.failed = False

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until something is so; the caller holds the lock."""
        deadline = time.monotonic() + TIME_LIMIT
        while not ready():
            self.changed.wait(1.0)
            if self.failed:
                raise RuntimeError("another rank failed")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not end")


class _Message:
    """One side of a message; the other side is its partner once both have come."""

    def __init__(self, board: Switchboard, tensor: torch.Tensor, name: str) -> None:
        assert tensor.is_contiguous()
        self.tensor = tensor
        self.partner: _Message | None = None
        self.is_done = False
        self._board = board
        self._name = name

    def wait(self) -> None:
        """Wait for the partner, and move the bytes if it has not done so: never earlier."""
        with self._board.changed:
            self._board.wait_for(lambda: self.partner is not None, self._name)
            if not self.is_done:
                assert self.partner is not None
                is_send = self._name.startswith("send")
                source, target = (self, self.partner) if is_send else (self.partner, self)
                assert source.tensor.shape == target.tensor.shape
                assert source.tensor.dtype == target.tensor.dtype
                target.tensor.copy_(source.tensor)
                self.is_done = self.partner.is_done = True


class ThreadTransport:
    """`Transport` between threads."""

    def __init__(self, board: Switchboard, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._board = board
        self._calls: dict[Any, int] = defaultdict(int)

    def send(self, tensor: torch.Tensor, peer: int, stages: tuple[int, int]) -> Pending:
        message = _Message(self._board, tensor, f"send {self.rank} -> {peer}")
        return self._meet((self.rank, peer), message, self._board.sends, self._board.receives)

    def receive(self, buffer: torch.Tensor, peer: int, stages: tuple[int, int]) -> Pending:
        message = _Message(self._board, buffer, f"receive {peer} -> {self.rank}")
        return self._meet((peer, self.rank), message, self._board.receives, self._board.sends)

    def sum(self, tensor: torch.Tensor, ranks: Sequence[int], channel: int = 0) -> Pending:
        if len(ranks) == 1:
            return Done()
        place = (tuple(ranks), channel)
        key = (*place, self._calls[place])
        self._calls[place] += 1
        with self._board.changed:
            parts = self._board.sums[key]
            parts[self.rank] = tensor
            if len(parts) == len(ranks):
                assert len({p.shape for p in parts.values()}) == 1, "ranks add up different things"
                # In order of ranks, so that the last bits do not depend on who came first.
                # Without the modes of this thread: its rank does not hold what the channels do.
                with _disable_current_modes():
                    total = torch.stack([parts[rank].clone() for rank in sorted(ranks)]).sum(0)
                    for part in parts.values():
                        part.copy_(total)
                self._board.changed.notify_all()
        return _Sum(self._board, key)

    def broadcast(self, tensor: torch.Tensor, source: int, ranks: Sequence[int]) -> Pending:
        if self.rank != source:
            tensor.zero_()
        return self.sum(tensor, ranks)

    def _meet(self, channel: Any, message: _Message, mine: Any, others: Any) -> _Message:
        with self._board.changed:
            if others[channel]:
                message.partner = others[channel].popleft()
                message.partner.partner = message
                self._board.changed.notify_all()
            else:
                mine[channel].append(message)
        return message


class _Sum:
    def __init__(self, board: Switchboard, key: Any) -> None:
        self._board, self._key = board, key
        self._is_done = False

    def wait(self) -> None:
        ranks = self._key[0]
        with self._board.changed:
            if self._is_done:
                return
            parts = self._board.sums[self._key]
            self._board.wait_for(lambda: len(parts) == len(ranks), f"a sum over {ranks}")
            self._is_done = True
            self._board.read[self._key] += 1
            if self._board.read[self._key] == len(ranks):
                # Else a long run would keep every tensor that was ever added up.
                del self._board.sums[self._key], self._board.read[self._key]


def run_threads(world_size: int, function: Callable[[ThreadTransport], Any]) -> list[Any]:
    """Run `function(transport)` on every rank; the results by rank."""
    board = Switchboard()
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadTransport(board, rank, world_size))
        except BaseException as error:
            errors.append(error)
            with board.changed:
                board.failed = True
                board.changed.notify_all()

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT + 10)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


class OwnCopy:
    """A captured model whose parameters are this thread's own: capture once, run many plans."""

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph
        self._memo: dict[int, Any] = {}

    def stage(
        self, start: int, stop: int, training: bool = True, recompute: Any = ()
    ) -> StageProgram:
        return copy.deepcopy(self._graph.stage(start, stop, training, recompute), self._memo)

    def release(self, keep: set[int]) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


class TrainingOnly(OwnCopy):
    """Without the evaluation mode, whose capture takes as long again, for runs that don't evaluate."""

    def stage(
        self, start: int, stop: int, training: bool = True, recompute: Any = ()
    ) -> StageProgram:
        return super().stage(start, stop, True, recompute)

    def tensors(self, training: bool = True) -> tuple[BoundaryTensor, ...]:
        return self._graph.tensors()


def compute_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on one rank computes at a time: the process has one generator for all of them.

    A forward or backward does not communicate, so that no rank waits for another inside.
    """
    turn = threading.Lock()
    for name in ("forward", "backward"):
        original = getattr(StageRunner, name)

        def alone(*arguments: Any, original: Any = original, **named: Any) -> Any:
            with turn:
                return original(*arguments, **named)

        monkeypatch.setattr(StageRunner, name, alone)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Plain gradient descent, which shows any error in a gradient's scale."""
    return torch.optim.SGD(parameters, lr=0.1)


def on_ranks(
    graph: LayerGraph,
    plan: Plan,
    work: Callable[[Trainer], Any],
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    **arguments: Any,
) -> list[Any]:
    """What `work` gives on each rank of a plan, each with a trainer and parameters of its own."""
    return run_threads(
        plan.num_devices,
        lambda transport: work(
            Trainer(
                OwnCopy(graph),
                plan,
                optimizer,
                transport=transport,
                device=torch.device("cpu"),
                record=False,
                **arguments,
            )
        ),
    )
