"""How a launched run ends: by itself, by a failed rank, by a signal."""

from __future__ import annotations

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException

from dapple.errors import FileError, InputError, RunError
from dapple.runtime.launch import launch


def test_a_signal_to_the_launcher_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is told in a word, without the launcher's traceback."""

    def told_to_end(_: object) -> None:
        raise SignalException("told to end", sigval=2)

    monkeypatch.setattr(torchrun, "run", told_to_end)
    with pytest.raises(KeyboardInterrupt):
        launch(2, "dapple", [])


@pytest.mark.parametrize(
    ("module", "argument", "code", "kind"),
    [("json.tool", "--no-such-flag", 2, InputError), ("timeit", "no_such_name", 1, RunError)],
)
def test_the_exit_code_of_the_ranks_is_passed_on(
    module: str, argument: str, code: int, kind: type[Exception]
) -> None:
    """A mistake stays a mistake, a failure a failure; the ranks are named with their codes."""
    with pytest.raises(kind, match=f"rank 0 with {code}"):
        launch(1, module, [argument])


def test_what_every_rank_refuses_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    """By the launcher, as the ranks' own error; they print nothing."""
    with pytest.raises(FileError, match=r"^none.toml does not exist; check the path$"):
        launch(2, "dapple", ["train", "none.toml"])
    assert capfd.readouterr() == ("", "")
