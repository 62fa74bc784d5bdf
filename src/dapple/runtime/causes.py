"""What an exception tells of the cause of a failure."""

from __future__ import annotations

import traceback

import torch.distributed as dist

_MAX_CHARACTERS = 400

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


def one_line(error: BaseException) -> str:
    """An exception in words, as one line and without the C++ frames that torch appends."""
    text = "".join(traceback.format_exception_only(error)).partition("\nException raised from ")[0]
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + " ..."


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
