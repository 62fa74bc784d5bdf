"""The store seen as a notice board: heartbeats, the one failure of a run, and who has left."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta

import torch.distributed as dist

from dapple.errors import RankFailure, RunError
from dapple.runtime.heartbeat import Beat


@dataclasses.dataclass(frozen=True)
class Notice:
    """The failure that ends a run.

    Attributes:
        rank: the rank that failed.
        stage: its stage.
        micro_batch: the micro-batch in work, None outside of one.
        action: what it was doing.
        cause: the original exception, or what was observed, in words.
        author: the rank that put the notice up; another one if the failed rank could not.
    """

    rank: int
    stage: int | None
    micro_batch: int | None
    action: str
    cause: str
    author: int

    def failure(self) -> RankFailure:
        """The notice as the exception that a user sees."""
        return RankFailure(self.rank, self.stage, self.micro_batch, self.action, self.cause)


class NoticeBoard:
    """A client of the store for the monitor's thread alone.

    A client serves one caller at a time, so that of the main thread, which may wait in it for
    minutes, can't be shared. Every call is a round trip of some 15 us on one machine, and raises
    RuntimeError or OSError when the store is gone.

    Args:
        host, port: where the store listens; somebody else hosts it.
        rank: this rank.
        attempt: which restart of the job this is; the notices of another attempt mean nothing.

    Raises:
        RunError: the store cannot be reached.
    """

    def __init__(self, host: str, port: int, rank: int, attempt: str) -> None:
        try:
            client = dist.TCPStore(
                host, port, None, False, timedelta(seconds=30), wait_for_workers=False
            )
            # The n-th monitor of a process talks to the n-th monitors of the others, so that one
            # run after another in the same processes reads no notice of the one before.
            turn = client.add(f"dapple/{attempt}/turn/{rank}", 1)
        except (RuntimeError, OSError) as error:
            raise RunError(
                f"the store at {host}:{port} cannot be reached ({_first_line(error)}); start the "
                "run with torchrun, or set MASTER_ADDR and MASTER_PORT to where rank 0 hosts it"
            ) from error
        self._store = dist.PrefixStore(f"dapple/{attempt}/{turn}", client)

    def write_beat(self, beat: Beat) -> None:
        """Put up the heartbeat of a rank."""
        self._store.set(f"beat/{beat.rank}", beat.encode())

    def read_beat(self, rank: int) -> Beat:
        """The last heartbeat of a rank."""
        return Beat.decode(rank, self._read(f"beat/{rank}"))

    def post(self, notice: Notice) -> Notice:
        """Put up a notice; the first of all ranks stays, and is returned."""
        text = json.dumps(dataclasses.asdict(notice))
        return self._decode(self._store.compare_set("failure", "", text))

    def notice(self) -> Notice | None:
        """The notice that was put up, if one was."""
        text = self._read("failure")
        return self._decode(text.encode()) if text else None

    def count(self, event: str, increase: int = 0) -> int:
        """How many ranks have come to an event, this one included if it says so."""
        return self._store.add(event, increase)

    def _read(self, key: str) -> str:
        # get() would wait for a missing key; this leaves it missing and answers with "".
        return self._store.compare_set(key, "", "").decode()

    @staticmethod
    def _decode(text: bytes) -> Notice:
        return Notice(**json.loads(text))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
