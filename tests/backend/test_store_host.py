"""The job's store is made within the timeout, and its error says who hosts it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from commlayer.backend import store_host
from commlayer.backend.store_host import _make_store
from commlayer.profiles.errors import CollectiveTimeoutError


class Clock:
    """A clock that goes on when a store is tried; each try takes ``families`` times what it is given."""

    def __init__(self, families: int) -> None:
        self.now_s, self.families = 100.0, families
        self.sizes: list[int | None] = []

    def monotonic(self) -> float:
        return self.now_s

    def fail(self, host: str, port: int, rank: int, world_size: int | None, timeout: timedelta, *args: Any) -> None:
        self.sizes.append(world_size)
        self.now_s += self.families * timeout.total_seconds()
        raise RuntimeError("The client socket has timed out after 7000ms while trying to connect to (node0, 29500).")


@pytest.mark.parametrize("families", [1, 2])
def test_a_store_that_never_answers(families: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(families)
    monkeypatch.setattr(store_host, "time", clock)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(
        CollectiveTimeoutError, match=r"^rank 3, joining the job: the job's store at node0:29500 did not"
    ) as caught:
        _make_store(clock.fail, "node0", 29500, 3, timedelta(seconds=16), True)
    assert "within 16 s: rank 0 hosts it" in str(caught.value)
    assert 14.4 <= clock.now_s - 100.0 <= 16.0
    assert set(clock.sizes) == {None}, "the host waits for nobody"


def test_another_error_is_torchs_own() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("The server socket has failed to listen on any local network address. EADDRINUSE")

    with pytest.raises(RuntimeError, match="EADDRINUSE"):
        _make_store(fail, "node0", 29500, 0, timedelta(seconds=16))
