"""What an exception tells of the cause of a failure."""

from __future__ import annotations

import torch.distributed as dist

# What the libraries below say when the other end is gone. A word too many costs a doubtful failure
# some seconds of looking for a better cause; a word too few names the wrong rank.
_LOST_PEER_WORDS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "timeout",
    "socket",
    "pair closure",
    "remote process exited",
    "remote error",
    "nccl",
)


def tells_of_a_lost_peer(error: BaseException) -> bool:
    """The exception, or one that it comes from, may be the consequence of another rank's end."""
    link: BaseException | None = error
    while link is not None:
        text = str(link).lower()
        if isinstance(link, (ConnectionError, TimeoutError, dist.DistError)) or (
            isinstance(link, RuntimeError) and any(word in text for word in _LOST_PEER_WORDS)
        ):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False
