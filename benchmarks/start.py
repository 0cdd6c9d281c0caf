"""The start of a job against its number of ranks: what every rank asks of the store, and sends to others, until it has groups.

Each rank counts what ``init_process_group`` and eight ``new_group`` of all ranks cost it, on the backend commlayer and on torch's
Gloo. Up to ``--real`` ranks are real: processes on this machine, each with its connections. Beyond it they are fakes, because a
machine has not the sockets for n² connections of eighteen meshes: processes as well, and all of commlayer is real in them, but
what stands in for Gloo asks the store as Gloo does (that was counted with the real ones, and this program compares the two) and
takes its messages through a store of its own that is not counted.

Counts do not depend on the machine; the seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, Store, TCPStore
from torch.distributed import distributed_c10d

import commlayer.backend.create
import commlayer.backend.new_groups  # before forking, or each rank would load it
from commlayer.agree.tree import GatheredStore
from commlayer.failures.waits import Watched

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # what its helpers are shared with
from counting_store import CountingStore

GROUPS = 8
BACKENDS = ("gloo", "commlayer")
_TIMEOUT = timedelta(seconds=300)
_ADDRESS = re.compile(r"/fake/\d+$")
_FAKE_ADDRESS_BYTES = 32
"""Gloo's own has 154 and 8 a rank; of fakes only numbers are looked at, not bytes."""


class FakeStore(CountingStore):
    """Counts the fakes' addresses without asking anybody for them."""

    def set(self, key: str, value: bytes | str) -> None:
        if _ADDRESS.search(key):
            self.count("set")
        else:
            super().set(key, value)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if _ADDRESS.search(keys[0]):
            self.count("wait", len(keys))
        else:
            super().wait(keys, timeout)

    def get(self, key: str) -> bytes:
        if _ADDRESS.search(key):
            self.count("get")
            return b""
        return super().get(key)


class Done:
    """The work of a message that has gone or come."""

    def wait(self, _: object = None) -> bool:
        return True


class FakeGloo:
    """Gloo's part at the start: meets the others in ``store``, and passes messages on, through ``line``."""

    made = 0
    line: Any = None

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        del timeout
        FakeGloo.made += 1
        self._mesh, self._rank = FakeGloo.made, rank
        self._messages: Counter[str] = Counter()
        store.set(f"fake/{rank}", "x" * _FAKE_ADDRESS_BYTES)
        for peer in range(size):
            store.wait([f"fake/{peer}"])
            store.get(f"fake/{peer}")

    def _key(self, source: int, target: int) -> str:
        pair = f"{self._mesh}/{source}/{target}"
        self._messages[pair] += 1
        return f"message/{pair}/{self._messages[pair]}"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Done:
        del tag
        FakeGloo.line.set(self._key(self._rank, peer), tensors[0].view(torch.uint8).numpy().tobytes())
        return Done()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Done:
        del tag
        key = self._key(peer, self._rank)
        data = bytearray(FakeGloo.line.get(key))
        FakeGloo.line.delete_key(key)
        tensors[0].view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
        return Done()

    def _set_sequence_number_for_group(self) -> None:
        pass


class _OfAll(type):
    def __instancecheck__(cls, _: object) -> bool:
        return True


class FakeOfTorch(metaclass=_OfAll):
    """A call of this gives what torch takes for a Gloo group: one of its own that does nothing, after asking ``store`` as Gloo
    does. torch asks whether groups are of this class, which all are."""

    def __new__(cls, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
        FakeGloo(store, rank, size, timeout)
        return FakeProcessGroup._create_internal(rank, size)


def made_of_fakes(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The stand-in that commlayer takes for a Gloo group; its second mesh is C++'s, which holds only what is torch's own."""
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return (FakeOfTorch if isinstance(inner, GatheredStore) else FakeGloo)(store, rank, size, timeout)


# A rank


class Messages:
    """Counts the messages in which ranks agree; a message is its length and its content."""

    def __init__(self) -> None:
        self.number = self.num_bytes = 0
        for verb in ("send", "recv"):
            setattr(Watched, verb, self._counting(getattr(Watched, verb), is_sending=verb == "send"))

    def _counting(self, original: Callable[..., Any], *, is_sending: bool) -> Callable[..., Any]:
        def call(watched: Watched, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
            self.number += 1
            if is_sending:
                self.num_bytes += tensors[0].numel() * tensors[0].element_size()
            return original(watched, tensors, peer, tag)

        return call


def run_rank(backend: str, rank: int, size: int, port: int, *, is_real: bool) -> dict[str, Any]:
    """The cost of the start for this rank."""
    torch.set_num_threads(1)
    os.environ["COMMLAYER_PROFILE"] = "none"
    inner = TCPStore("127.0.0.1", port, None, False, _TIMEOUT, wait_for_workers=False)
    store = CountingStore(inner) if is_real else FakeStore(inner)
    if not is_real:
        FakeGloo.line = TCPStore("127.0.0.1", port, None, False, _TIMEOUT, wait_for_workers=False)
        setattr(FakeProcessGroup, "_set_sequence_number_for_group", lambda _: None)  # noqa: B010  torch's has none
        setattr(distributed_c10d, "ProcessGroupGloo", FakeOfTorch)  # noqa: B010  of a type, as far as mypy sees
        setattr(commlayer.backend.create, "gloo_in_order", made_of_fakes)  # noqa: B010  likewise
    messages, found = Messages(), {}
    began, before = time.perf_counter(), Counter[str]()
    for name in ("init", "groups"):
        if name == "init":
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
        else:
            for _ in range(GROUPS):
                dist.new_group(list(range(size)))
        found[name] = dict(store.operations - before)
        before = store.operations.copy()
    return found | {
        "operations": store.operations.total(),
        "store_bytes": store.num_bytes,
        "messages": messages.number // 2,
        "message_bytes": messages.num_bytes,
        "seconds": time.perf_counter() - began,
    }


def be_rank(folder: Path, backend: str, rank: int, size: int, port: int, *, is_real: bool) -> None:
    """Run in a forked child, to its end; the others' connections stay until all have counted."""
    status = 1
    try:
        found = run_rank(backend, rank, size, port, is_real=is_real)
        (folder / f"{rank}.tmp").write_text(json.dumps(found), encoding="utf-8")
        (folder / f"{rank}.tmp").rename(folder / f"{rank}.json")
        gate = TCPStore("127.0.0.1", port, None, False, _TIMEOUT, wait_for_workers=False)
        if gate.add("gate", 1) == size:
            gate.set("open", "1")
        gate.wait(["open"], _TIMEOUT)
        status = 0
    except BaseException:  # noqa: BLE001  a child must not return into its parent's program
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def start_server() -> tuple[int, int]:
    """The process that serves the job's store, and its port: not this one, whose threads forked ranks would lack."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        store = TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        signal.pause()
    port = int(os.read(reading, 16))
    os.close(reading)
    os.close(writing)
    return child, port


def run(backend: str, size: int, *, is_real: bool) -> dict[str, Any]:
    """The largest share of any rank in a start of ``size`` ranks. Raises SystemExit where a rank fails."""
    server, port = start_server()
    with tempfile.TemporaryDirectory() as name:
        folder, children = Path(name), []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                be_rank(folder, backend, rank, size, port, is_real=is_real)
            children.append(child)
        # All are waited for: a rank that fails is noticed by the others.
        failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        if failed:
            raise SystemExit(f"{len(failed)} of {size} ranks failed on {backend}, the first is rank {failed[0]}")
        ranks = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    found: dict[str, Any] = {key: max(each[key] for each in ranks) for key in ranks[0] if key not in ("init", "groups")}
    for name in ("init", "groups"):
        found[name] = max((each[name] for each in ranks), key=lambda counts: sum(counts.values()))
    return found | {"backend": backend, "ranks": size, "is_real": is_real}


def describe(counts: dict[str, int]) -> str:
    return " ".join(f"{name} {counts[name]}" for name in sorted(counts))


def print_table(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'ranks':>11} {'backend':>10} {'operations':>11} {'ratio':>6} {'bytes':>9} {'messages':>9} {'bytes':>9} {'s':>6}"
    )
    torchs = {(row["ranks"], row["is_real"]): row["operations"] for row in rows if row["backend"] == "gloo"}
    for row in rows:
        ratio = row["operations"] / torchs[row["ranks"], row["is_real"]]
        ranks = f"{row['ranks']} {'real' if row['is_real'] else 'fake'}"
        carried = [str(row[key]) if row["is_real"] else "-" for key in ("store_bytes", "message_bytes")]
        print(
            f"{ranks:>11} {row['backend']:>10} {row['operations']:>11} {ratio:>6.3f} {carried[0]:>9} {row['messages']:>9} "
            f"{carried[1]:>9} {row['seconds']:>6.1f}"
        )
        for name in ("init", "groups"):
            print(f"{'':22} {name}: {describe(row[name])}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="What a rank asks of the store at the start, against the number of ranks."
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[8, 64, 512], help="numbers of ranks (default 8 64 512)"
    )
    parser.add_argument(
        "--real", type=int, default=64, help="the most ranks that are real; more are fakes (default 64)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    smallest = min(options.ranks)
    kinds = [(size, size <= options.real) for size in options.ranks]
    if smallest <= options.real < max(options.ranks):
        kinds.insert(1, (smallest, False))  # the fakes beside the real ones
    rows = [run(backend, size, is_real=is_real) for size, is_real in kinds for backend in BACKENDS]
    if options.json:
        print(json.dumps({"torch": str(torch.__version__), "groups": GROUPS, "rows": rows}, indent=1))
        return
    print(
        f"torch {torch.__version__}, the largest share of any rank in init_process_group and {GROUPS} new_group of all ranks"
    )
    print_table(rows)


if __name__ == "__main__":
    main()
