"""pytest plugin: the fixture `emulated_cluster`. Loaded by pytest itself, so it imports nothing heavy.

def test_all_ranks_agree(emulated_cluster):
    cluster = emulated_cluster(nodes=2, ranks_per_node=4, inter="400mbit")
    assert cluster.run(my_function) == [42] * 8
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import pytest

if TYPE_CHECKING:
    from commlayer.emulation import EmulatedCluster

__all__ = ["ClusterFactory", "emulated_cluster"]


ClusterFactory: TypeAlias = "type[EmulatedCluster]"
"""The type of the fixture `emulated_cluster`: it makes an `EmulatedCluster`, of that one's arguments,
which is closed when the test ends."""


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known also where it is not listed in the project's own settings."""
    config.addinivalue_line("markers", "cluster: starts real processes on an emulated cluster")


@pytest.fixture
def emulated_cluster() -> Iterator[ClusterFactory]:
    """Factory of emulated clusters; all that a test makes are closed when it ends, however it ends."""
    from commlayer.emulation import EmulatedCluster

    with contextlib.ExitStack() as stack:

        def build(*shape: Any, **links: Any) -> EmulatedCluster:
            return stack.enter_context(EmulatedCluster(*shape, **links))

        yield cast("ClusterFactory", build)
