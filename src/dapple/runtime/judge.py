"""From the heartbeats of a run's ranks: has one failed, which, and why."""

from __future__ import annotations

from dapple.runtime.heartbeat import JOINT_ACTIONS, WAITING_ACTIONS, Beat, ProcessName, Pulses
from dapple.runtime.noticeboard import Notice, NoticeBoard
from dapple.runtime.patience import Patience

# How many of the ranks after it, in a ring, a rank watches. Each dead group of up to this many is
# seen by somebody at once, and the store's load grows with the ranks, not with their square.
_WATCHED_RANKS = 8


def ranks_to_watch(rank: int, world_size: int) -> list[int]:
    """Those that a rank looks at: some after it, in a ring."""
    ring = (rank + 1 + step for step in range(min(_WATCHED_RANKS, world_size - 1)))
    return [other % world_size for other in ring]


class Judge:
    """Judges for one rank.

    Args:
        board: where all ranks put up their beats.
        pulses: what this rank has seen of them.
        process: this process.
        rank: this rank.
        world_size: number of ranks.
        patience: the time limits.
    """

    def __init__(
        self,
        board: NoticeBoard,
        pulses: Pulses,
        process: ProcessName,
        rank: int,
        world_size: int,
        patience: Patience,
    ) -> None:
        self._board = board
        self._pulses = pulses
        self._process = process
        self._rank = rank
        self._world_size = world_size
        self._patience = patience

    def find(self, own: Beat, searching: bool) -> Notice | None:
        """The failure that ends the run, if there is one.

        Args:
            own: this rank's beat.
            searching: something has died, and the question is only who.
        """
        return self._silent_rank(searching) or self._deserted(own) or self._stall(own)

    def notice(self, beat: Beat, cause: str) -> Notice:
        """This rank's notice about the rank of a beat."""
        return Notice(beat.rank, beat.stage, beat.micro_batch, beat.action, cause, self._rank)

    def _silent_rank(self, searching: bool) -> Notice | None:
        """The notice about a rank that has ended or does not beat."""
        if gone := self._pulses.gone(self._process.machine):
            return self.notice(gone, "the process was killed, or ended without close()")
        patience = self._patience
        limit = patience.quick_stale_seconds if searching else patience.stale_seconds
        if not (silent := self._pulses.silent(limit, also_unstarted=searching)):
            return None
        beat, seconds = silent
        what = "heartbeat yet" if beat.count < 0 else f"heartbeat for {seconds:.1f} s"
        cause = f"no {what}: the process or its machine was stopped, is unreachable, or has ended"
        return self.notice(beat, cause)

    def _deserted(self, own: Beat) -> Notice | None:
        """The notice about a rank that has left while this one waits for all ranks.

        A rank closes after its last step, and all ranks meet at the start of each: whoever waits
        there for seconds beside one that has closed waits for a step that will not be.
        """
        limit = self._patience.deserted_seconds
        if own.action not in JOINT_ACTIONS or own.action_seconds < limit:
            return None
        for rank in range(self._world_size):
            beat = self._board.read_beat(rank)
            if beat.action == "close" and beat.action_seconds >= limit:
                cause = (
                    f"it has closed the run, but rank {self._rank} began another step: its data "
                    "ended before the others'; give every rank as many batches"
                )
                return self.notice(beat, cause)
        return None

    def _stall(self, own: Beat) -> Notice | None:
        """The notice that nothing moves any more, about a rank that does not wait for another."""
        limit = self._patience.stall_seconds
        if own.action_seconds < limit:
            return None
        others = (self._board.read_beat(r) for r in range(self._world_size) if r != self._rank)
        beats = [own, *others]
        if any(beat.action_seconds < limit for beat in beats):
            return None  # that rank still gets on, and this one may have to wait for it
        waits = [beat.action in WAITING_ACTIONS for beat in beats]
        beat = min(beats, key=lambda beat: (beat.action in WAITING_ACTIONS, beat.rank))
        how = "all wait for each other" if all(waits) else "this one does not wait for another"
        seconds = f"{own.action_seconds:.0f} s"
        cause = f"stalled: no rank has begun a new action for {seconds}, and {how}"
        return self.notice(beat, cause)
