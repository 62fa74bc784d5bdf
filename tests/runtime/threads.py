"""Ranks as threads of one process, joined by queues that know no tags: order is all there is.

Stands for NCCL, whose messages are first in, first out for each pair and direction, and makes a
whole plan run in milliseconds.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dapple.graph import LayerGraph, StageProgram
from dapple.records import Plan
from dapple.runtime.trainer import Trainer
from dapple.runtime.transport import Done, Pending

TIME_LIMIT = 60.0


class Switchboard:
    """The queues between the ranks, and the sums under way."""

    def __init__(self) -> None:
        self.queues: dict[Any, queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()
        self.sums: dict[Any, list[torch.Tensor]] = defaultdict(list)
        self.ready: dict[Any, threading.Event] = defaultdict(threading.Event)
        self.failed = threading.Event()


class ThreadTransport:
    """`Transport` between threads."""

    def __init__(self, board: Switchboard, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._board = board
        self._calls: dict[Any, int] = defaultdict(int)

    def send(self, tensor: torch.Tensor, peer: int, stages: tuple[int, int]) -> Pending:
        assert tensor.is_contiguous()
        self._board.queues[self.rank, peer].put(tensor.clone())
        return Done()

    def receive(self, buffer: torch.Tensor, peer: int, stages: tuple[int, int]) -> Pending:
        assert buffer.is_contiguous()
        source = self._board.queues[peer, self.rank]
        # Posted receives take messages in the order of posting, not of waiting.
        ticket = _Ticket(self._board, source, buffer)
        waiting = self._board.queues.setdefault(("posted", peer, self.rank), queue.Queue())
        waiting.put(ticket)  # type: ignore[arg-type]
        ticket.waiting = waiting
        return ticket

    def sum(self, tensor: torch.Tensor, ranks: Sequence[int]) -> Pending:
        if len(ranks) == 1:
            return Done()
        key = (tuple(ranks), self._calls[tuple(ranks)])
        self._calls[tuple(ranks)] += 1
        with self._board.lock:
            parts = self._board.sums[key]
            parts.append(tensor)
            event = self._board.ready[key]
            if len(parts) == len(ranks):
                total = torch.stack([p.clone() for p in parts]).sum(0)
                for part in parts:
                    part.copy_(total)
                event.set()
        return _Wait(self._board, event)


class _Ticket:
    def __init__(self, board: Switchboard, source: Any, buffer: torch.Tensor) -> None:
        self._board, self._source, self._buffer = board, source, buffer
        self.waiting: Any = None
        self.done = False

    def wait(self) -> None:
        while not self.done:
            first = self.waiting.get_nowait()
            message = _get(self._board, first._source)
            assert first._buffer.shape == message.shape, (first._buffer.shape, message.shape)
            assert first._buffer.dtype == message.dtype
            first._buffer.copy_(message)
            first.done = True


class _Wait:
    def __init__(self, board: Switchboard, event: threading.Event) -> None:
        self._board, self._event = board, event

    def wait(self) -> None:
        for _ in range(int(TIME_LIMIT / 0.05)):
            if self._event.wait(0.05):
                return
            if self._board.failed.is_set():
                raise RuntimeError("another rank failed")
        raise TimeoutError("a sum did not end")


def _get(board: Switchboard, source: Any) -> torch.Tensor:
    for _ in range(int(TIME_LIMIT / 0.05)):
        try:
            return source.get(timeout=0.05)
        except queue.Empty:
            if board.failed.is_set():
                raise RuntimeError("another rank failed") from None
    raise TimeoutError("a message did not arrive")


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
            board.failed.set()

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


class OwnCopy:
    """A captured model whose parameters are this thread's own: capture once, run many plans."""

    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph
        self._memo: dict[int, Any] = {}

    def stage(self, start: int, stop: int, training: bool = True) -> StageProgram:
        return copy.deepcopy(self._graph.stage(start, stop, training), self._memo)

    def release(self, keep: set[int]) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


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
