"""The emulated cluster: real processes, real namespaces, coarse checks of the wire, and nothing left behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commlayer.emulation import (
    EmulatedCluster,
    EmulationWarning,
    RankFailure,
    RanksFailedError,
    RanksTimedOutError,
    Rights,
    format_rate,
    jobs,
    modes,
    parse_rate,
    request_shape,
    rights,
)
from commlayer.emulation.jobs import ClusterLayout, pick_port
from commlayer.profiles.errors import ClusterError, RankFailedError, RightsError, SettingsError, UsageError
from commlayer.testing.plugin import ClusterFactory

cluster_test = pytest.mark.cluster


@pytest.fixture
def netns_cluster(emulated_cluster: ClusterFactory) -> ClusterFactory:
    """Factory of clusters of namespaces; skips where the machine does not grant them."""
    granted = rights()
    if not (granted.netns and granted.shaping):
        pytest.skip(granted.reason)
    return emulated_cluster


@pytest.fixture(params=["netns", "loopback"])
def either_cluster(request: pytest.FixtureRequest, emulated_cluster: ClusterFactory) -> EmulatedCluster:
    """A 2x2 cluster of each kind: what has nothing to do with wires must hold for both."""
    if request.param == "netns" and not rights().netns:
        pytest.skip(rights().reason)
    return emulated_cluster(2, 2, mode=request.param)


def rank() -> int:
    return int(os.environ["RANK"])


# ---------------------------------------------------------------- rates, arguments


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("400mbit", 50_000_000), ("3.2gbit", 400_000_000), ("50mbyte", 50_000_000), (" 800 Kbit ", 100_000)],
)
def test_rates_read_as_tc_writes_them(text: str, bytes_per_s: int) -> None:
    assert parse_rate(text) == bytes_per_s
    assert parse_rate(format_rate(bytes_per_s)) == bytes_per_s


@pytest.mark.parametrize("text", ["400", "", "fast", "-4mbit", "4furlongs", "1bit", "900gbit", "nanmbit", 400])
def test_a_bad_rate_names_the_argument_and_gives_an_example(text: str) -> None:
    with pytest.raises(UsageError, match=r"inter: .*(mbit|gbit)"):
        parse_rate(text, "inter")


def test_bits_and_bytes_are_not_confused_silently() -> None:
    with pytest.raises(UsageError, match="'400mbit' or '400mbyte'"):
        parse_rate("400mbps")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0}, "nodes: expected a whole number"),
        ({"ranks_per_node": True}, "ranks_per_node"),
        ({"nodes": 100, "ranks_per_node": 100}, "at most"),
        ({"delay_us": -1.0}, "delay_us"),
        ({"delay_us": float("nan")}, "delay_us"),
        ({"intra": "quick"}, "intra"),
        ({"mode": "docker"}, "mode: expected one of auto, netns, loopback"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EmulatedCluster(**arguments)  # type: ignore[arg-type]


def test_importing_the_package_or_the_plugin_loads_neither_torch_nor_pyroute2() -> None:
    code = (
        "import sys, commlayer.emulation, commlayer.testing.plugin; "
        "assert not {'torch', 'pyroute2', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- ranks


@cluster_test
def test_results_come_in_rank_order_with_torchruns_environment(either_cluster: EmulatedCluster) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "COMMLAYER_EMULATED"]
    results = either_cluster.run(lambda offset: (rank() + offset, *(os.environ[name] for name in names)), 10)
    mode = either_cluster.mode
    assert results == [(10 + r, str(r), "4", str(r % 2), "2", str(r // 2), mode) for r in range(4)]
    masters = either_cluster.run(lambda: (os.environ["MASTER_ADDR"], os.environ.get("COMMLAYER_TOPOLOGY")))
    assert masters == [("10.77.0.1", None) if mode == "netns" else ("127.0.0.1", "2x2")] * 4


@cluster_test
def test_a_large_result_and_a_result_of_nothing(either_cluster: EmulatedCluster) -> None:
    results = either_cluster.run(lambda: bytes(8_000_000) if rank() == 1 else None)
    assert [None if value is None else len(value) for value in results] == [None, 8_000_000, None, None]


@cluster_test
def test_nodes_have_their_own_network_host_name_and_address(netns_cluster: ClusterFactory) -> None:
    cluster = netns_cluster(2, 2)

    def look() -> tuple[str, str, str, str, list[str], str]:
        interfaces = sorted(name for _, name in socket.if_nameindex())
        peer = socket.gethostbyname(f"node{1 - rank() // 2}")
        reverse = socket.getnameinfo(("::ffff:10.77.0.2", 1), socket.NI_NAMEREQD)[0]
        return os.readlink("/proc/self/ns/net"), socket.gethostname(), peer, reverse, interfaces, os.getcwd()

    networks, hostnames, peers, reverse, interfaces, directories = zip(*cluster.run(look), strict=True)
    assert networks[0] == networks[1] != networks[2] == networks[3]
    assert os.readlink("/proc/self/ns/net") not in networks
    assert hostnames == ("node0", "node0", "node1", "node1")
    assert peers == ("10.77.0.2", "10.77.0.2", "10.77.0.1", "10.77.0.1")
    assert set(reverse) == {"node1"}
    assert interfaces == (["eth0", "lo"],) * 4
    assert set(directories) == {os.getcwd()}
    assert "node0" not in Path("/etc/hosts").read_text(encoding="utf-8")


@cluster_test
def test_two_clusters_at_once_do_not_meet(netns_cluster: ClusterFactory) -> None:
    first, second = netns_cluster(2, 1, inter="400mbit"), netns_cluster(3, 1, inter="100mbit")
    networks: list[str] = []
    thread = threading.Thread(target=lambda: networks.extend(first.run(network_after_a_moment)))
    thread.start()
    networks += second.run(network_after_a_moment)
    thread.join()
    assert len(set(networks)) == 5
    first.close()
    assert second.rates() == [{"inter": "100mbit", "intra": "unshaped"}] * 3


def network_after_a_moment() -> str:
    time.sleep(0.1)
    return os.readlink("/proc/self/ns/net")


def test_a_port_on_loopback_is_free_and_none_that_the_kernel_gives_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ClusterLayout(1, 2, "loopback")
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    assert max(pick_port(layout, 0) for _ in range(100)) < lowest
    with socket.create_server(("127.0.0.1", pick_port(layout, 0))) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(jobs, "_LOOPBACK_PORTS", range(port, port + 1))
        with pytest.raises(ClusterError, match=f"free port on 127.0.0.1, got none of 100 between {port} and {port}"):
            pick_port(layout, 0)


@cluster_test
def test_2x8_starts_every_rank(netns_cluster: ClusterFactory) -> None:
    assert netns_cluster(2, 8, inter="400mbit").run(rank) == list(range(16))


@cluster_test
def test_gloo_finds_its_peers(netns_cluster: ClusterFactory, capfd: pytest.CaptureFixture[str]) -> None:
    import torch
    import torch.distributed as dist

    def reduce() -> float:
        dist.init_process_group("gloo")
        total = torch.full((4,), float(dist.get_rank()))
        dist.all_reduce(total)
        return float(total[0])

    assert netns_cluster(2, 2, inter="400mbit").run(reduce) == [6.0] * 4
    assert "hostname of the client socket" not in capfd.readouterr().err


@cluster_test
def test_the_parents_buffered_output_appears_once(tmp_path: Path) -> None:
    script = tmp_path / "printing.py"
    script.write_text(
        "from commlayer.emulation import EmulatedCluster\n"
        "import os\n"
        "import sys\n"
        "sys.stdout = open(1, 'w', buffering=100, closefd=False)\n"
        "sys.stdout.write('before ')\n"
        "with EmulatedCluster(1, 2) as cluster:\n"
        "    cluster.run(lambda: sys.stdout.write('rank' + os.environ['RANK'] + ' '))\n"
        "sys.stdout.write('after')\n",
        encoding="utf-8",
    )
    output = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
    assert sorted(output.split()) == sorted(["before", "rank0", "rank1", "after"])


# ---------------------------------------------------------------- failures


@cluster_test
def test_an_exception_names_its_rank_and_shows_its_traceback(either_cluster: EmulatedCluster) -> None:
    def fail() -> int:
        if rank() == 2:
            raise ValueError("lost my marbles")
        return rank()

    with pytest.raises(RankFailedError, match=r"(?s)rank 2 \(node 1\).*in fail.*lost my marbles") as caught:
        either_cluster.run(fail, grace_s=20)
    error = caught.value
    assert isinstance(error, RanksFailedError)
    assert [failure.rank for failure in error.failures] == [2]
    assert error.results == [0, 1, None, 3]
    assert isinstance(error.failures[0].exception, ValueError)
    assert error.__cause__ is error.failures[0].exception
    assert error.failures[0].exitcode == 1


@cluster_test
def test_an_exception_that_cannot_be_pickled_is_told_all_the_same(either_cluster: EmulatedCluster) -> None:
    class LocalError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def fail() -> None:
        raise LocalError(1, 2)

    with pytest.raises(RanksFailedError, match="LocalError: 1 and 2") as caught:
        either_cluster.run(fail)
    assert caught.value.failures[0].exception is None
    assert len(caught.value.failures) == 4


@cluster_test
def test_a_result_that_cannot_be_pickled_is_the_ranks_failure(either_cluster: EmulatedCluster) -> None:
    with pytest.raises(RanksFailedError, match="type lock cannot be pickled"):
        either_cluster.run(threading.Lock)


@cluster_test
@pytest.mark.parametrize(
    ("end", "exitcode", "by_signal", "words"),
    [
        (lambda: os._exit(3), 3, None, "exited with code 3"),
        (lambda: sys.exit(5), 5, None, "raised SystemExit: 5"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), None, 9, r"killed by signal 9 \(SIGKILL\)"),
    ],
)
def test_a_dead_rank_is_reported_and_the_others_have_their_grace(
    emulated_cluster: ClusterFactory,
    tmp_path: Path,
    end: Callable[[], object],
    exitcode: int,
    by_signal: int,
    words: str,
) -> None:
    def die_or_wait() -> None:
        (tmp_path / str(rank())).touch()
        if rank() == 1:
            assert wait_until(lambda: len(os.listdir(tmp_path)) == 4)
            end()
        time.sleep(0.2 if rank() == 0 else 60)

    with pytest.raises(RanksFailedError, match=rf"rank 1 \(node 0\): {words}") as caught:
        emulated_cluster(2, 2).run(die_or_wait, grace_s=2.0)
    first, *others = caught.value.failures
    assert (first.rank, first.exitcode, first.signal, first.by_cluster) == (1, exitcode, by_signal, False)
    assert [failure.rank for failure in others] == [2, 3]
    assert all(failure.reason == "killed by the cluster after rank 1 failed" for failure in others)
    assert all(failure.by_cluster and "in die_or_wait" in failure.traceback for failure in others)


@cluster_test
def test_without_check_the_survivors_can_be_asked(either_cluster: EmulatedCluster) -> None:
    def survive() -> str:
        if rank() == 3:
            os._exit(7)
        if rank() == 2:
            time.sleep(0.1)
            raise ConnectionError("peer 3 is gone")
        return "fine"

    outcomes = either_cluster.run(survive, check=False)
    assert [outcome.value for outcome in outcomes] == ["fine", "fine", None, None]
    assert [outcome.ok for outcome in outcomes] == [True, True, False, False]
    failures = [outcome.failure for outcome in outcomes]
    assert isinstance(failures[2], RankFailure)
    assert isinstance(failures[2].exception, ConnectionError)
    assert isinstance(failures[3], RankFailure)
    assert failures[3].exitcode == 7


@cluster_test
def test_a_timeout_names_who_still_ran_and_where(either_cluster: EmulatedCluster) -> None:
    def hang_here() -> int:
        if rank() % 2:
            time.sleep(60)
        return rank()

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"(?s)2 of 4 ranks still ran.*rank 1, 3.*in hang_here") as caught:
        either_cluster.run(hang_here, timeout_s=5.0)  # of which the others need some milliseconds
    assert time.monotonic() - start < 30
    assert isinstance(caught.value, RanksTimedOutError)
    assert caught.value.results == [0, None, 2, None]
    assert no_children_but_fabrics(either_cluster)
    assert either_cluster.run(rank) == [0, 1, 2, 3]


def no_children_but_fabrics(*clusters: EmulatedCluster) -> bool:
    fabrics = {cluster._fabric.pid for cluster in clusters if cluster._fabric is not None}
    return set(children()) <= fabrics


def children() -> list[int]:
    listed = (
        Path(f"/proc/self/task/{task}/children").read_text(encoding="utf-8") for task in os.listdir("/proc/self/task")
    )
    return [int(word) for text in listed for word in text.split()]


# ---------------------------------------------------------------- nothing is left


@cluster_test
def test_nothing_is_left_after_a_cluster(netns_cluster: ClusterFactory) -> None:
    netns_cluster(1, 1).close()  # imports and caches are warm
    before = sorted(os.listdir("/proc/self/fd")), children(), socket.if_nameindex()
    with netns_cluster(
        2, 2, inter="400mbit", intra="1gbit", delay_us=100 if rights().delay != "none" else 0
    ) as cluster:
        cluster.run(rank)
        with contextlib.suppress(RanksFailedError):
            cluster.run(lambda: os._exit(1) if rank() == 3 else time.sleep(60), grace_s=0)
    after = sorted(os.listdir("/proc/self/fd")), children(), socket.if_nameindex()
    assert after == before
    cluster.close()
    with pytest.raises(UsageError, match="closed"):
        cluster.run(rank)


@cluster_test
def test_grandchildren_that_fled_die_with_the_run(netns_cluster: ClusterFactory) -> None:
    def leave_a_daemon() -> int:
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    daemons = netns_cluster(1, 2).run(leave_a_daemon)
    assert wait_until(lambda: not any(alive(pid) for pid in daemons))


@cluster_test
def test_ctrl_c_kills_the_ranks(either_cluster: EmulatedCluster) -> None:
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        either_cluster.run(time.sleep, 60)
    timer.join()
    assert no_children_but_fabrics(either_cluster)
    assert either_cluster.run(rank) == [0, 1, 2, 3]


KILLED_PARENT = r"""
import os, subprocess, sys, time
from commlayer.emulation import EmulatedCluster

def work():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os.write(1, f"{os.getpid()} {child.pid} {os.readlink('/proc/self/ns/net')}\n".encode())
    time.sleep(1000)

cluster = EmulatedCluster(2, 2, inter="400mbit", delay_us=1000.0, mode="netns")
os.write(1, f"{cluster._fabric.pid} {cluster._fabric.pid} net:fabric\n".encode())
cluster.run(work)
"""


@cluster_test
def test_a_killed_parent_leaves_nothing(netns_cluster: ClusterFactory) -> None:
    if rights().delay == "none":
        pytest.skip(rights().reason)
    parent = subprocess.Popen([sys.executable, "-c", KILLED_PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    lines = [parent.stdout.readline().split() for _ in range(5)]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    pids = [int(word) for line in lines for word in line[:2]]
    assert wait_until(lambda: not any(alive(pid) for pid in pids))
    networks = {line[2] for line in lines}
    assert wait_until(lambda: not networks & set(all_networks()))


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False


def all_networks() -> Iterator[str]:
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/{entry}/ns/net")


def wait_until(condition: Callable[[], bool], patience_s: float = 30.0) -> bool:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# ---------------------------------------------------------------- the wire


class Line:
    """A TCP connection from the first rank, or another one, to the only other rank that opens one."""

    def __init__(self, host: str, first: int = 0) -> None:
        self.first = rank() == first
        if self.first:
            with socket.create_server((host, 5000)) as server:
                self.socket, _ = server.accept()
        else:
            deadline = time.monotonic() + 10
            while True:
                try:
                    self.socket = socket.create_connection((host, 5000))
                    break
                except ConnectionRefusedError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds until the other end has all and has said so."""
        start = time.monotonic()
        if self.first:
            self.socket.sendall(bytes(num_bytes))
            assert self.socket.recv(1)
        else:
            missing = num_bytes
            while missing:
                data = self.socket.recv(min(missing, 1 << 20))
                if not data:
                    raise ConnectionError("the first rank has had enough")
                missing -= len(data)
            self.socket.sendall(b"k")
        return time.monotonic() - start


# A busy machine makes a wire slower, never faster: rates are told by the least times that they allow, three quarters of them.


def transfers(host: str, num_bytes: int) -> float:
    line = Line(host)
    return min(line.transfer_s(num_bytes) for _ in range(2))


@cluster_test
def test_rates_shape_the_wire_and_change(netns_cluster: ClusterFactory) -> None:
    cluster = netns_cluster(2, 1, inter="200mbit")
    assert cluster.run(transfers, "10.77.0.1", 4_000_000)[0] >= 0.12
    cluster.shape(inter="50mbit")
    slow_s = cluster.run(transfers, "10.77.0.1", 4_000_000)[0]
    assert slow_s >= 0.48
    cluster.shape(inter=None)
    assert cluster.run(transfers, "10.77.0.1", 4_000_000)[0] < slow_s


@cluster_test
def test_one_node_can_be_slower_and_the_inside_of_a_node_too(netns_cluster: ClusterFactory) -> None:
    cluster = netns_cluster(1, 2, intra="200mbit")
    assert cluster.run(transfers, "127.0.0.1", 4_000_000)[0] >= 0.12
    cluster.shape(inter="1gbit")
    assert cluster.rates() == [{"inter": "1gbit", "intra": "200mbit"}]
    pair = netns_cluster(2, 1)
    pair.shape(inter="100mbit", node=1)
    assert pair.rates() == [{"inter": name, "intra": "unshaped"} for name in ("unshaped", "100mbit")]
    assert pair.run(transfers, "10.77.0.1", 4_000_000)[0] >= 0.24
    with pytest.raises(UsageError, match="node: expected None"):
        pair.shape(inter="1gbit", node=2)
    with pytest.raises(UsageError, match="inter: expected a rate"):
        pair.shape(inter="plenty")


@cluster_test
def test_the_way_between_two_nodes_can_be_slower_than_their_cards(netns_cluster: ClusterFactory) -> None:
    def transfer_s(sender: int, receiver: int) -> float:
        if rank() not in (sender, receiver):
            return 0.0
        line = Line(f"10.77.0.{sender + 1}", first=sender)
        return min(line.transfer_s(2_000_000) for _ in range(2))

    def seconds(sender: int, receiver: int) -> float:
        return cluster.run(transfer_s, sender, receiver)[sender]

    cluster = netns_cluster(3, 1, inter="400mbit")
    cluster.shape_pair(0, 1, "20mbit")
    slow_s = min(seconds(0, 1), seconds(1, 0))
    assert slow_s >= 0.6
    assert seconds(0, 2) < slow_s
    cluster.shape_pair(0, 1, None)
    cluster.shape_pair(2, 1, "20mbit", is_one_way=True)
    assert seconds(2, 1) >= 0.6
    assert max(seconds(0, 1), seconds(1, 2)) < slow_s
    with pytest.raises(UsageError, match="two different ones of 0 to 2, got 1 and 3"):
        cluster.shape_pair(1, 3, "20mbit")
    with pytest.raises(UsageError, match="rate: expected a rate"):
        cluster.shape_pair(0, 1, "plenty")


@cluster_test
def test_the_bucket_of_a_card_holds_for_what_goes_a_slow_way_too(netns_cluster: ClusterFactory) -> None:
    cluster = netns_cluster(2, 1, inter="400mbit")
    cluster.shape_pair(0, 1, "300mbit")
    cluster.shape(inter="50mbit")
    assert cluster.run(transfers, "10.77.0.1", 4_000_000)[0] >= 0.48


@cluster_test
def test_a_rate_changes_under_a_running_program(netns_cluster: ClusterFactory) -> None:
    cluster = netns_cluster(2, 1, inter="400mbit")

    under_way, begun = os.pipe()
    changed, go_on = os.pipe()

    def before_and_after() -> tuple[float, float]:
        line = Line("10.77.0.1")
        before_s = line.transfer_s(500_000)
        if line.first:
            os.write(begun, b"x")
            os.read(changed, 1)
        return before_s, line.transfer_s(500_000)

    def shape_it() -> None:
        os.read(under_way, 1)
        cluster.shape(inter="10mbit")
        os.write(go_on, b"x")

    thread = threading.Thread(target=shape_it)
    thread.start()
    before_s, after_s = cluster.run(before_and_after)[0]
    thread.join()
    for fd in (under_way, begun, changed, go_on):
        os.close(fd)
    assert before_s >= 0.0075
    assert after_s >= 0.3


@cluster_test
def test_a_cluster_runs_one_thing_at_a_time(emulated_cluster: ClusterFactory) -> None:
    cluster = emulated_cluster(1, 1)
    under_way, begun = os.pipe()
    over, end = os.pipe()

    def wait_for_the_end() -> None:
        os.write(begun, b"x")
        os.read(over, 1)

    thread = threading.Thread(target=cluster.run, args=(wait_for_the_end,))
    thread.start()
    os.read(under_way, 1)
    with pytest.raises(UsageError, match="running something already"):
        cluster.run(rank)
    os.write(end, b"x")
    thread.join()
    for fd in (under_way, begun, over, end):
        os.close(fd)
    assert cluster.run(rank) == [0]


@cluster_test
def test_a_rank_can_ask_for_another_rate(netns_cluster: ClusterFactory) -> None:
    cluster = netns_cluster(2, 1, inter="200mbit")

    def fast_then_slow() -> tuple[float, float]:
        line = Line("10.77.0.1")
        fast_s = line.transfer_s(4_000_000)
        if line.first:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                request_shape(inter="50mbit")
            assert said.getvalue() == "commlayer: emulated cluster: all nodes: inter 50mbit from now on\n"
            with pytest.raises(UsageError, match="inter: unknown unit"):
                request_shape(inter="50furlong")
        return fast_s, line.transfer_s(4_000_000)

    fast_s, slow_s = cluster.run(fast_then_slow)[0]
    assert fast_s >= 0.12
    assert slow_s >= 0.48
    assert [node["inter"] for node in cluster.rates()] == ["50mbit", "50mbit"]
    with pytest.raises(UsageError, match="outside"):
        request_shape(inter="1gbit")


@cluster_test
def test_a_delay_is_in_every_round_trip(netns_cluster: ClusterFactory) -> None:
    if rights().delay == "none":
        with pytest.raises(RightsError, match="sch_netem"):
            netns_cluster(2, 1, delay_us=3_000.0)
        return

    def delayed() -> tuple[float, float]:
        line = Line("10.77.0.1")
        round_trip_s = min(line.transfer_s(1) for _ in range(20))
        return round_trip_s, line.transfer_s(2_000_000)

    round_trip_s, bulk_s = netns_cluster(2, 1, inter="200mbit", delay_us=3_000.0).run(delayed)[0]
    assert 0.006 <= round_trip_s < 0.5
    assert bulk_s >= 0.06


@cluster_test
def test_a_delay_changes_while_ranks_run(netns_cluster: ClusterFactory) -> None:
    if rights().delay == "none":
        pytest.skip("no delays here")
    cluster = netns_cluster(2, 1, delay_us=100.0)

    def delayed() -> float:
        line = Line("10.77.0.1")
        return min(line.transfer_s(1) for _ in range(20))

    cluster.delay(5_000.0)
    assert cluster.run(delayed)[0] >= 0.01
    for delay_us in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(UsageError, match="delay_us"):
            cluster.delay(delay_us)
    with pytest.raises(UsageError, match="has no delay"):
        netns_cluster(2, 1).delay(100.0)


# ---------------------------------------------------------------- programs


@cluster_test
def test_command_runs_a_program_as_every_rank(
    either_cluster: EmulatedCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    code = "import os; os.write(1, '{RANK} {WORLD_SIZE} {LOCAL_RANK}\\n'.format(**os.environ).encode())"
    assert either_cluster.command([sys.executable, "-S", "-c", code]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 4 0", "1 4 1", "2 4 0", "3 4 1"]


@cluster_test
def test_ranks_and_programs_are_batch_jobs_but_where_an_accelerators_timers_count(
    emulated_cluster: ClusterFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    """A rank that wakes up does not push aside one that sends: `forked_ranks._set_up`."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("these tests have a scheduling policy of their own, which ranks keep")

    def policies() -> tuple[int, list[int]]:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
        thread.start()
        thread.join()
        return os.sched_getscheduler(0), found

    program = [sys.executable, "-S", "-c", "import os; print(os.sched_getscheduler(0))"]
    accelerators: tuple[dict[str, Any], ...] = ({}, {"compute": "1gflops"})
    for accelerator, expected in zip(accelerators, (os.SCHED_BATCH, os.SCHED_OTHER), strict=True):
        cluster = emulated_cluster(1, 2, mode="loopback", **accelerator)
        assert cluster.run(policies) == [(expected, [expected])] * 2
        assert cluster.command(program) == 0
        assert capfd.readouterr().out.split() == [str(expected)] * 2
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "of the parent's nothing changes"


@cluster_test
def test_a_rank_that_may_not_become_a_batch_job_runs_all_the_same(
    emulated_cluster: ClusterFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert emulated_cluster(1, 2, mode="loopback").run(os.getppid) == [os.getpid()] * 2


@cluster_test
def test_command_once_per_node_is_ready_for_torchrun(
    either_cluster: EmulatedCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    script = "echo ${RANK-none} $PET_NNODES $PET_NODE_RANK $PET_NPROC_PER_NODE ${PET_MASTER_PORT:+port}"
    assert either_cluster.command(["sh", "-c", script], per_node=True) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["none 2 0 2 port", "none 2 1 2 port"]


@cluster_test
def test_command_returns_the_first_failure(either_cluster: EmulatedCluster) -> None:
    script = 'if [ "$RANK" = 2 ]; then exit 4; else exec sleep 60; fi'
    assert either_cluster.command(["sh", "-c", script], grace_s=0.1) == 4
    assert either_cluster.command(["sh", "-c", "kill -TERM $$"]) == 128 + 15
    with pytest.raises(RanksFailedError, match=r"rank 2 \(node 1\): exited with code 4"):
        either_cluster.command(["sh", "-c", script], grace_s=0.1, check=True)
    with pytest.raises(RanksTimedOutError, match="rank 0, 1, 2, 3"):
        either_cluster.command(["sleep", "60"], timeout_s=0.2)
    with pytest.raises(UsageError, match="no program 'no-such-thing'"):
        either_cluster.command(["no-such-thing"])
    with pytest.raises(UsageError, match="expected a list"):
        either_cluster.command("echo hello")


@cluster_test
def test_a_program_can_ask_for_another_rate(netns_cluster: ClusterFactory) -> None:
    cluster = netns_cluster(2, 1, inter="200mbit")
    code = textwrap.dedent("""
        import os
        from commlayer.emulation import request_shape
        request_shape(inter=None, intra="1gbit", node=int(os.environ["GROUP_RANK"]))
    """)
    assert cluster.command([sys.executable, "-c", code]) == 0
    assert cluster.rates() == [{"inter": "unshaped", "intra": "1gbit"}] * 2


# ---------------------------------------------------------------- without the rights


@pytest.fixture
def no_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no right to create network namespaces (CAP_SYS_ADMIN): run as root"
    monkeypatch.setattr(modes, "rights", lambda: Rights(False, False, "none", reason))
    monkeypatch.setattr(modes, "_warned", False)


@cluster_test
@pytest.mark.usefixtures("no_rights")
def test_without_rights_it_warns_once_and_runs_on_loopback(emulated_cluster: ClusterFactory) -> None:
    with pytest.warns(EmulationWarning, match=r"CAP_SYS_ADMIN.*loopback, unshaped.*not comparable") as caught:
        cluster = emulated_cluster(2, 2, inter="400mbit")
    assert caught[0].filename.endswith(("test_emulation.py", "plugin.py"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emulated_cluster(2, 2, inter="400mbit")
    assert not cluster.shaped
    assert cluster.run(lambda: os.environ["GLOO_SOCKET_IFNAME"]) == ["lo"] * 4
    with pytest.raises(RightsError, match="loopback"):
        cluster.shape(inter="1gbit")

    def ask() -> None:
        with pytest.raises(RightsError, match="loopback"):
            request_shape(inter="1gbit")

    cluster.run(ask)


@pytest.mark.usefixtures("no_rights")
def test_without_rights_demanding_namespaces_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RightsError, match="run as root"):
        EmulatedCluster(1, 1, mode="netns")
    monkeypatch.setenv("COMMLAYER_EMULATION", "netns")
    with pytest.raises(RightsError, match="run as root"):
        EmulatedCluster(1, 1)
    monkeypatch.setenv("COMMLAYER_EMULATION", "kubernetes")
    with pytest.raises(SettingsError, match="COMMLAYER_EMULATION"):
        EmulatedCluster(1, 1)


def test_a_delay_is_never_dropped_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "delay needs the kernel's sch_netem"
    monkeypatch.setattr(modes, "rights", lambda: Rights(True, True, "none", reason))
    with pytest.raises(RightsError, match="sch_netem"):
        EmulatedCluster(2, 1, delay_us=100.0)


def test_without_pyroute2_it_says_what_to_install() -> None:
    code = textwrap.dedent("""
        import sys
        sys.modules["pyroute2"] = None
        from commlayer.emulation import rights
        assert "pip install 'pyroute2>=0.8'" in rights().reason
        assert not rights().netns
    """)
    subprocess.run([sys.executable, "-c", code], check=True)


@cluster_test
def test_an_unprivileged_user_gets_a_user_namespace(netns_cluster: ClusterFactory) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become someone else")

    def as_nobody() -> tuple[list[tuple[int, str]], list[str]]:
        rights.cache_clear()
        os.setgroups([])
        os.setgid(65_534)
        os.setuid(65_534)
        if not rights().netns:
            return [], []
        with EmulatedCluster(2, 1, inter="400mbit", mode="netns") as cluster:
            cluster.shape(inter="1gbit")
            return cluster.run(lambda: (os.getuid(), socket.gethostname())), [n["inter"] for n in cluster.rates()]

    netns_cluster(1, 1).close()  # everything is imported while the files can still be read
    with EmulatedCluster(1, 1, mode="loopback") as outer:
        found, rates = outer.run(as_nobody)[0]
    if not found:
        pytest.skip("the machine allows no user namespaces")
    assert found == [(65_534, "node0"), (65_534, "node1")]
    assert rates == ["1gbit", "1gbit"]
