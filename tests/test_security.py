"""Whether the sentences of docs/security.md are true: a test for each."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from synthetic_profiles import synthetic_profile
from torch._C._distributed_c10d import HashStore, TCPStore

from commlayer.agree.appointments import Appointment, Appointments
from commlayer.failures import failure_records as frames
from commlayer.failures import rank_links
from commlayer.failures.detector import FailureDetector
from commlayer.failures.failure_records import Gone, Left
from commlayer.measure.calibrate import cache_folder
from commlayer.peer_words import read_words
from commlayer.profiles.errors import DisagreementError, UsageError
from commlayer.profiles.files import read_file, write_file
from commlayer.profiles.strict_json import parse_object
from commlayer.readers import cluster_files
from commlayer.settings import Settings
from commlayer.testing.plugin import ClusterFactory
from commlayer.traces.rank_files import read_folder
from commlayer.transport.shared_memory.slabs import Segment

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "security.md"
HERE = "test_security.py"

CLAIMS = {
    "The failure detector of a rank listens": f"{HERE}::test_of_a_ranks_listeners_only_the_detector_is_on_all_interfaces",
    "A visitor of the detector who does not show": f"{HERE}::test_a_visitor_without_the_secret_is_not_believed",
    "A visitor who says nothing": f"{HERE}::test_silent_visitors_keep_nobody_out",
    "A visitor cannot have the detector keep": f"{HERE}::test_of_a_visitor_no_more_than_a_message_is_kept",
    "The secrets stand in the job's store": f"{HERE}::test_who_can_reach_the_store_can_read_the_secrets_and_is_believed",
    "Ranks of one node meet": "transport/test_shared_memory.py::test_the_socket_is_only_for_who_knows_the_secret",
    "Once ranks of a node have met": f"{HERE}::test_what_a_job_leaves_open_and_in_folders",
    "The memory that ranks": f"{HERE}::test_what_a_job_leaves_open_and_in_folders",
    "A process of another user": f"{HERE}::test_another_user_cannot_open_the_memory",
    "A job writes no file": f"{HERE}::test_what_a_job_leaves_open_and_in_folders",
    "Before a job writes such calls": "diagnosis/test_diagnose_files.py::test_only_old_logs_of_this_users_folders_are_removed",
    "The cache is in your own": f"{HERE}::test_where_the_cache_is",
    "Files have the rights": f"{HERE}::test_rights_are_the_umasks",
    "A file is written under": "profiles/test_files.py::test_a_draft_is_a_file_that_nobody_else_has_made",
    "In the cache a symbolic link": f"{HERE}::test_in_the_cache_a_link_is_replaced",
    "Nothing that commlayer reads": f"{HERE}::test_nothing_but_the_emulator_reads_pickles",
    "Its archives (tar, zip, gz)": "diagnosis/test_evidence.py::test_an_archive_that_unpacks_to_too_much_is_refused",
    "`commlayer diagnose` reads pickled": "diagnosis/test_recorder_dumps.py::test_a_dump_is_data_and_nothing_in_it_is_executed",
    "Where ranks tell each other": "agree/test_hostile_peer.py::",
    "What the store says of an appointment": f"{HERE}::test_a_false_appointment_is_refused",
    "A profile, a cluster and": f"{HERE}::test_descriptions_are_bounded_and_regular",
    "A damaged, nested or false": f"{HERE}::test_hostile_descriptions_are_errors_that_name_the_file",
    "A profile that lies": f"{HERE}::test_a_profile_that_lies_changes_no_result",
    "A damaged profile in the cache": "measure/test_calibrate.py::test_a_damaged_entry_is_measured_again_and_replaced",
    "A trace is read up to": "profiles/test_files.py::test_a_large_file_is_not_read_before_it_is_refused",
    "Of several files": "diagnosis/test_diagnose_files.py::test_a_nested_log_hides_no_other",
    "A log that a rank tells": "diagnosis/test_inquiry.py::test_a_log_that_unpacks_to_much_takes_no_memory",
    "All that commlayer prints": "test_gate.py::test_nothing_prints_beside_the_gates",
    "All words of peers": "test_gate.py::test_nothing_decodes_beside_the_gates",
    "Text from files and peers": "cli/test_printable.py::",
    "What the store is told": f"{HERE}::test_the_stores_traffic_is_plain",
    "What Gloo carries": f"{HERE}::test_gloos_traffic_is_plain",
    "Nothing of commlayer's asks": f"{HERE}::test_who_can_reach_the_store_can_read_the_secrets_and_is_believed",
    "A rank that has the secrets": f"{HERE}::test_who_can_reach_the_store_can_read_the_secrets_and_is_believed",
}


def test_every_sentence_has_a_test() -> None:
    sentences = re.findall(r"^- (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert all(any(sentence.startswith(begin) for begin in CLAIMS) for sentence in sentences), sentences
    assert all(any(sentence.startswith(begin) for sentence in sentences) for begin in CLAIMS), "gone from the page"
    for place in CLAIMS.values():
        file, _, name = place.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {name}(" in text if name else "def test_" in text, place


# The failure detector


def two_of(stores: Sequence[Any]) -> list[FailureDetector]:
    """``stores``: the same one, through a connection for each rank, because a wait on one holds up who else asks it."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: FailureDetector(stores[rank], rank, (0, 1), 20.0), (0, 1)))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FailureDetector]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = two_of([HashStore()] * 2)
    yield found
    for each in found:
        each.close("the test is over")


def links_of(detector: FailureDetector) -> rank_links.Links:
    assert detector.links is not None
    return detector.links


def visit(detector: FailureDetector) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", links_of(detector).port), 20.0)
    connection.settimeout(20.0)
    return connection


def is_shown_out(visitor: socket.socket) -> bool:
    try:
        return visitor.recv(1) == b""
    except ConnectionResetError:  # there was more to be read
        return True


def test_a_visitor_without_the_secret_is_not_believed(pair: list[FailureDetector]) -> None:
    first, second = pair
    assert len(links_of(first).secret) == 16
    assert links_of(first).secret != links_of(second).secret
    guess = frames.Hello(1, b"?" * 16, b"?" * 16, 1)
    for words in (guess, frames.Hello(1, b"", b"", 1), Gone(1, 1), Left(1, "bye", is_failure=True)):
        with visit(first) as visitor:
            visitor.sendall(frames.framed(words) + frames.framed(Gone(1, 1)))
            assert is_shown_out(visitor)
    assert not first.knowledge.gone
    assert not first.knowledge.left


def test_silent_visitors_keep_nobody_out(pair: list[FailureDetector]) -> None:
    first = pair[0]
    assert rank_links._MOST_STRANGERS == 64
    visitors = [visit(first) for _ in range(rank_links._MOST_STRANGERS + 1)]
    assert is_shown_out(visitors[0])
    with visit(first) as late:
        late.sendall(frames.framed(frames.Hello(1, links_of(first).secret, b"mine", 1)))
        assert rank_links.received(late) == frames.Welcome(b"mine")
    for visitor in visitors:
        visitor.close()


def test_of_a_visitor_no_more_than_a_message_is_kept(pair: list[FailureDetector]) -> None:
    assert frames.MAX_FRAME_BYTES == 64 << 10
    with visit(pair[0]) as visitor:
        visitor.sendall(frames.LENGTH.pack(frames.MAX_FRAME_BYTES + 1))
        assert is_shown_out(visitor)


def test_who_can_reach_the_store_can_read_the_secrets_and_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    host = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    first, second = two_of([host, host.clone()])  # type: ignore[attr-defined]  # torch's annotations lack it
    stranger = TCPStore("127.0.0.1", host.port, None, False, timedelta(seconds=20), wait_for_workers=False)
    card = read_words(stranger.get("detector/0"), frames.Card, "rank 0")
    assert card.secret == links_of(first).secret
    with visit(first) as visitor:
        visitor.sendall(frames.framed(frames.Hello(1, card.secret, b"mine", 1)))
        assert rank_links.received(visitor) == frames.Welcome(b"mine")
        visitor.sendall(frames.framed(Left(1, "says the stranger", is_failure=True)))
        with first.knowledge.changed:
            assert first.knowledge.changed.wait_for(lambda: first.knowledge.left, 20.0)
    for each in (first, second):
        each.close("the test is over")


# A job


def started() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("commlayer", timeout=timedelta(seconds=60))
    return dist.get_rank()


def own_sockets(table: str) -> Iterator[list[str]]:
    """The rows of a table of the kernel's, split, that are sockets of this process."""
    links = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    inodes = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii", errors="replace").splitlines()[1:]:
        row = line.split()
        if row[6 if table == "unix" else 9] in inodes:
            yield row


@pytest.mark.cluster
def test_of_a_ranks_listeners_only_the_detector_is_on_all_interfaces(emulated_cluster: ClusterFactory) -> None:
    def job() -> list[tuple[str, bool]]:
        started()
        group: Any = dist.group.WORLD
        dist.all_reduce(torch.ones(1 << 18))
        ours = links_of(group._planned.board.detector).port
        listening = [row[1] for table in ("tcp", "tcp6") for row in own_sockets(table) if row[3] == "0A"]
        dist.barrier()
        return [(address.split(":")[0], int(address.split(":")[1], 16) == ours) for address in listening]

    for found in emulated_cluster(2, 2).run(job)[1:]:  # rank 0 hosts torch's store
        assert [set(address) == {"0"} for address, is_ours in found if is_ours] == [True]
        assert len(found) > 1, "Gloo's are looked at too"
        assert not any(set(address) == {"0"} for address, is_ours in found if not is_ours)


@pytest.mark.cluster
def test_what_a_job_leaves_open_and_in_folders(emulated_cluster: ClusterFactory, tmp_path: Path) -> None:
    def job() -> tuple[int, list[str], list[str]]:
        os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = str(tmp_path / "home")
        os.environ |= {"COMMLAYER_PROFILE": "none", "COMMLAYER_PLAN": "hierarchical"}
        os.chdir(tmp_path / "home")
        started()
        dist.all_reduce(torch.ones(1 << 18))
        listening = sum(int(row[3], 16) & 0x10000 != 0 for row in own_sockets("unix"))
        links = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        ]
        memory = [link for link in links if "memfd:commlayer" in link]
        named = [link for link in links if link.startswith(("/dev/shm", "/tmp", str(tmp_path)))]
        dist.barrier()
        dist.destroy_process_group()
        return listening, memory, named

    (tmp_path / "home").mkdir()
    for listening, memory, named in emulated_cluster(2, 2).run(job):
        assert listening == 0
        assert set(memory) - {"/memfd:commlayer-stacks (deleted)"} == {"/memfd:commlayer (deleted)"}  # the emulator's
        assert not [name for name in named if "commlayer" in name]
    assert not list((tmp_path / "home").iterdir())


def test_another_user_cannot_open_the_memory() -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs root, to become another user")
    segment = Segment.create(1)
    place = f"/proc/{os.getpid()}/fd/{segment.fileno()}"
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.close(os.open(place, os.O_RDWR))
            os._exit(1)
        except PermissionError:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


# Files


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(Settings()) == tmp_path / ".cache" / "commlayer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder(Settings()) == tmp_path / "x" / "commlayer"
    assert cache_folder(Settings(cache="/else")) == Path("/else")


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644)])
def test_rights_are_the_umasks(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_file(tmp_path / "profile.json", "{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "profile.json").stat().st_mode) == mode


@pytest.mark.parametrize("new_only", [False, True])
def test_in_the_cache_a_link_is_replaced(tmp_path: Path, new_only: bool) -> None:
    mine, link = tmp_path / "mine", tmp_path / "cache.json"
    mine.write_text("precious", encoding="utf-8")
    link.symlink_to(mine)
    if new_only:
        with pytest.raises(FileExistsError):
            write_file(link, "{}", new_only=True, follow_links=False)
    else:
        write_file(link, "{}", follow_links=False)
        assert not link.is_symlink()
        assert link.read_text(encoding="utf-8") == "{}"
    assert mine.read_text(encoding="utf-8") == "precious"
    saves = re.findall(
        r"profile\.save\(([^)]*)\)", (ROOT / "commlayer/measure/calibrate.py").read_text(encoding="utf-8")
    )
    assert saves
    assert all("follow_links=False" in arguments for arguments in saves)


RUNS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "yaml"}
RUNNERS = {"eval", "exec", "all_gather_object", "broadcast_object_list", "scatter_object_list", "gather_object"}


def running(source: str) -> set[str]:
    """The calls in ``source`` that make code of data."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= RUNS & {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= RUNS & {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_bare = isinstance(node.func, ast.Name)
            if name in RUNNERS and (is_bare or name not in ("eval", "exec")):
                found.add(name)
            if ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
                found.add(ast.unparse(node.func))
    return found


def test_nothing_but_the_emulator_reads_pickles() -> None:
    assert running("import pickle\ntorch.load(f)\neval(x)\nmodel.eval()\ndist.all_gather_object(a, b)") == {
        "pickle",
        "torch.load",
        "eval",
        "all_gather_object",
    }
    modules = [
        path for room in ("commlayer", "scheduler", "profiles", "integrations") for path in (ROOT / room).rglob("*.py")
    ]
    found = {str(path.relative_to(ROOT)) for path in modules if running(path.read_text(encoding="utf-8"))}
    writes = "commlayer/diagnosis/flight_recorder.py"  # for torch's own analyzer, which reads nothing else
    assert "pickle.load" not in (ROOT / writes).read_text(encoding="utf-8")
    reads = (
        "commlayer/diagnosis/recorder_dumps.py"  # dumps of torch's, as data: test_recorder_dumps.py tries hostile ones
    )
    text = (ROOT / reads).read_text(encoding="utf-8")
    assert {word for word in ("pickle.load(", "pickle.loads(", "pickle.Unpickler(") if word in text} == set()
    assert found == {"commlayer/emulation/rank_process.py", "commlayer/emulation/forked_ranks.py", writes, reads}


@pytest.mark.parametrize(
    "words", [b"\x93", msgspec.msgpack.encode({"number": "1"}), msgspec.msgpack.encode([1] * 9), b""]
)
def test_a_false_appointment_is_refused(words: bytes) -> None:
    store = HashStore()
    store.set("appointment/1", words)  # type: ignore[arg-type]  # bytes, too
    mine = Appointments(lambda: store, 1, 2, lambda waited_s: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(DisagreementError):
        mine.turn()
    assert mine.next_call() is None, "calls go on as planned"
    assert Appointment(1, 5, "measure", 1.0).call == 5


def test_descriptions_are_bounded_and_regular(tmp_path: Path) -> None:
    large, fifo = tmp_path / "large", tmp_path / "fifo"
    with large.open("wb") as file:
        file.truncate((64 << 20) + 1)
    os.mkfifo(fifo)
    for path in (large, fifo, Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"larger file|FIFO|device|directory"):
            read_file(path)
        with pytest.raises(UsageError, match="cannot read"):
            cluster_files.resolve(str(path))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"gpu": ' * 50_000, '{"gpu": ' + "9" * 10_000 + "}", "\x00", "[]"])
@pytest.mark.parametrize("parse", [cluster_files.parse, parse_object])
def test_hostile_descriptions_are_errors_that_name_the_file(parse: Callable[[str, str], Any], text: str) -> None:
    with pytest.raises(UsageError, match=r"theirs\.json"):
        parse(text, "theirs.json")


@pytest.mark.cluster
@pytest.mark.parametrize("bytes_per_us", [1e-3, 1e9])
def test_a_profile_that_lies_changes_no_result(
    emulated_cluster: ClusterFactory, tmp_path: Path, bytes_per_us: float
) -> None:
    def job(name: str) -> list[float]:
        os.environ |= {"COMMLAYER_PROFILE": name, "COMMLAYER_TRIALS": "off"}
        rank = started()
        x = torch.arange(1 << 18, dtype=torch.float32) * (rank + 1)
        dist.all_reduce(x)
        dist.barrier()
        return x[:: 1 << 12].tolist()

    path = tmp_path / "lies.json"
    synthetic_profile(bytes_per_us={"inter": bytes_per_us}, nodes=2, ranks_per_node=2).save(path)
    expected = (torch.arange(1 << 18, dtype=torch.float32) * 10)[:: 1 << 12].tolist()
    assert emulated_cluster(2, 2).run(job, str(path)) == [expected] * 4


def test_a_nested_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank_0.json").write_bytes(b'{"commlayer": {"format": 1, "job": ' + b"[" * 100_000)
    with pytest.raises(UsageError):
        list(read_folder(tmp_path))


# What is not protected


def test_the_stores_traffic_is_plain() -> None:
    host = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:

        def listen() -> None:
            client, _ = between.accept()
            with client, socket.create_connection(("127.0.0.1", host.port)) as server:

                def back() -> None:
                    with contextlib.suppress(OSError):  # the test is over
                        while data := server.recv(1 << 16):
                            client.sendall(data)

                threading.Thread(target=back, daemon=True).start()
                while data := client.recv(1 << 16):
                    seen.extend(data)
                    server.sendall(data)

        threading.Thread(target=listen, daemon=True).start()
        client = TCPStore(
            "127.0.0.1", between.getsockname()[1], None, False, timedelta(seconds=20), wait_for_workers=False
        )
        client.set("key", "as it is")
        assert client.get("key") == b"as it is"
    assert b"as it is" in seen


@pytest.mark.cluster
def test_gloos_traffic_is_plain(emulated_cluster: ClusterFactory) -> None:
    words = b"these words go as they are"

    def job() -> bool | None:
        os.environ["COMMLAYER_PROFILE"] = "none"
        rank = started()
        try:
            wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        except PermissionError:
            wire = None
        dist.barrier()
        x = (
            torch.frombuffer(bytearray(words * 4), dtype=torch.uint8).clone()
            if rank == 0
            else torch.zeros(104, dtype=torch.uint8)
        )
        dist.broadcast(x, 0)
        dist.barrier()
        if wire is None:
            return None
        wire.setblocking(False)
        seen = False
        with wire, contextlib.suppress(BlockingIOError):  # that was all
            while not seen:
                seen = words in wire.recv(1 << 16)
        return seen

    found = emulated_cluster(2, 1).run(job)
    if None in found:
        pytest.skip("NOT TESTED: needs the right to look at packets")
    assert any(found)
