"""Sites of torchft's, each a node with one replica of one rank: a lighthouse, managers, and a tiny model under DiLoCo or
LocalSGD. Runs inside ranks, several ways in one after the other.
"""

from __future__ import annotations

import ast
import os
import socket
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import TCPStore  # torch.distributed has it too, but not for type checkers

import commlayer.backend.new_groups  # noqa: F401  once, before ranks are forked
from commlayer.integrations.torchft import planned_process_group
from commlayer.statistics import Stats, stats

LIMIT = timedelta(seconds=20)
SYNC_EVERY = 4


@dataclass(frozen=True)
class Way:
    """A way to train. ``pg``: the expression of its process group, as a user writes it; ``algorithm``: torchft's class;
    ``leaves_at``: the synchronisation, from 0, in which the last site breaks off."""

    pg: str
    algorithm: str = "DiLoCo"
    steps: int = 5 * SYNC_EVERY
    leaves_at: int | None = None


@dataclass(frozen=True)
class Trained:
    """The results of a site: its loss at each step, its parameters in the end, how many sites each synchronisation had (0: it was
    not committed), and the backend's statistics."""

    losses: list[float]
    parameters: torch.Tensor
    sites: list[int] = field(default_factory=list)
    stats: Stats | None = None


class Site:
    """One site of ``count``, with what torchft wants there: stores of its own, and a way to the first site's."""

    def __init__(self) -> None:
        self.rank, self.count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        master, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.shared = TCPStore(master, port, is_master=self.rank == 0, wait_for_workers=False, timeout=LIMIT)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, port))
            self.address = probe.getsockname()[0]
        self._stores: list[TCPStore] = []
        self._ways = 0

    def new_store(self) -> TCPStore:
        """A store of this site's own, a new one for each way: a new lighthouse counts its quorums from 1 again, torchft names a
        group's keys by that number, and who reads those of the way before dials a port that is closed."""
        self._stores.append(TCPStore(self.address, 0, is_master=True, wait_for_workers=False, timeout=LIMIT))
        return self._stores[-1]

    def lighthouse(self) -> tuple[Any, str]:
        """The server, on the first site, and its address, of a new one for each way."""
        from torchft.coordination import LighthouseServer

        self._ways += 1
        server, key = None, f"lighthouse {self._ways}"
        if self.rank == 0:
            server = LighthouseServer(
                bind="0.0.0.0:0", min_replicas=2, join_timeout_ms=20_000, quorum_tick_ms=20, heartbeat_timeout_ms=5000
            )
            self.shared.set(key, f"http://{self.address}:{server.address().rpartition(':')[2]}")
        return server, self.shared.get(key).decode()

    def everyone(self, word: str, count: int) -> None:
        """Return when the first ``count`` sites have come."""
        self.shared.set(f"{word} {self._ways} {self.rank}", "")
        self.shared.wait([f"{word} {self._ways} {rank}" for rank in range(count)], LIMIT)

    def end(self) -> None:
        """The first site hosts the store, and so ends last."""
        if self.rank:
            self.shared.set(f"ended {self.rank}", "")
        else:
            self.shared.wait([f"ended {rank}" for rank in range(1, self.count)], LIMIT)

    def wait_until_known(self, lighthouse: str) -> None:
        """Return when the lighthouse has heard of all sites: it would begin without those that it does not know."""
        until = time.monotonic() + LIMIT.total_seconds()
        while True:
            with urllib.request.urlopen(f"{lighthouse}/status", timeout=5) as page:
                text = page.read().decode()
            missing = [rank for rank in range(self.count) if f"site_{rank}:" not in text]
            if not missing:
                return
            assert time.monotonic() < until, f"the lighthouse has not heard of sites {missing}: {text}"
            time.sleep(0.05)


class Left(Exception):
    """The site breaks off."""


def made_of(call: ast.expr, names: Mapping[str, Callable[..., Any]]) -> Any:
    """Call what is called there by one of these names, with literals; nothing else that words may say is run."""
    if not isinstance(call, ast.Call):
        return ast.literal_eval(call)
    assert isinstance(call.func, ast.Name)
    named = {each.arg: made_of(each.value, names) for each in call.keywords if each.arg}
    return names[call.func.id](*(made_of(each, names) for each in call.args), **named)


def train(ways: Sequence[Way]) -> list[Trained]:
    """Train one way after the other; a way in which this site leaves is its last."""
    torch.set_num_threads(1)
    site = Site()
    results = [_train(site, way) for way in ways]
    site.end()
    return results


def _train(site: Site, way: Way) -> Trained:
    import torchft

    names = {"ProcessGroupGloo": torchft.ProcessGroupGloo, "planned_process_group": planned_process_group}
    pg = made_of(ast.parse(way.pg, mode="eval").body, {**names, "timedelta": timedelta})
    server, lighthouse = site.lighthouse()
    model = _model()
    manager = torchft.Manager(
        pg=pg,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=2,
        use_async_quorum=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr=site.address,
        store_port=site.new_store().port,
        lighthouse_addr=lighthouse,
        replica_id=f"site_{site.rank}",
        hostname=site.address,
        init_sync=False,
        heartbeat_interval=timedelta(milliseconds=100),
    )
    site.wait_until_known(lighthouse)
    trained = Trained([], torch.empty(0))
    try:
        if way.leaves_at is not None and site.rank == site.count - 1:
            _leave_in(manager, pg, way.leaves_at)
        _steps(site, way, manager, model, trained)
        site_stats = stats()
    except Left:
        return trained
    finally:
        pg.shutdown()
        manager.shutdown(wait=False)
    site.everyone("done with", site.count - (way.leaves_at is not None))
    if server is not None:
        server.shutdown()
    whole = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    return Trained(trained.losses, whole, trained.sites, site_stats)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 32))


def _steps(site: Site, way: Way, manager: Any, model: nn.Module, trained: Trained) -> None:
    from torchft import local_sgd

    inner = torch.optim.SGD(model.parameters(), lr=0.3)
    if way.algorithm == "LocalSGD":
        algorithm = local_sgd.LocalSGD(manager, model, inner, SYNC_EVERY)
    else:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        algorithm = local_sgd.DiLoCo(manager, [model], inner, outer, SYNC_EVERY, use_bucketization=True)
    target = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    data = torch.Generator().manual_seed(2 + site.rank)
    with algorithm:
        for step in range(way.steps):
            x = torch.randn(16, 32, generator=data)
            loss = (model(x) - x @ target / 6).square().mean()
            inner.zero_grad()
            loss.backward()
            inner.step()
            trained.losses.append(loss.item())
            if step % SYNC_EVERY == SYNC_EVERY - 1:
                trained.sites.append(manager.num_participants() if manager.errored() is None else 0)


def _leave_in(manager: Any, pg: Any, number: int) -> None:
    """Break off in the synchronisation ``number``: with a quorum, and the others in the call."""
    run: Callable[..., Any] = manager.allreduce
    seen: list[None] = []

    def allreduce(*given: Any, **named: Any) -> Any:
        seen.append(None)
        if len(seen) <= number:
            return run(*given, **named)
        manager.wait_quorum()
        pg.abort()
        raise Left

    manager.allreduce = allreduce
