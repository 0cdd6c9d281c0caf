"""Asking all ranks of a running job what they wait for: when a call times out, on SIGUSR1, or when
this process aborts.

The rank that asks tells the failure detector, which passes it on at once; every rank that hears of
it takes a snapshot on the detector's thread, whatever its program does, also inside Gloo, and
before it hears of anything that the failure breaks. The logs meet in the job's store, where the
first rank to ask collects them, and finds what is wrong. It is printed once, by the lowest rank
that lives and answers (else by the one that asked); the errors of all ranks say it in one line.
Each step has a limit, and where the store is gone, every rank that asked prints its own log.

SIGUSR1 is taken only where nothing else takes it when the job starts, and given back only where
nothing else has taken it since. Python runs handlers when the main thread comes back to it, which
one that waits in C++ does not; so :mod:`faulthandler` writes to a pipe, from the signal itself, and
the detector's thread reads.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import secrets
import signal
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from commlayer.diagnosis.call_logs import RankLog, as_foreign
from commlayer.diagnosis.diagnosis_words import in_words, log_words, one_line, wait_words
from commlayer.diagnosis.findings import diagnose
from commlayer.diagnosis.log_files import folder_of, folder_path, write_log
from commlayer.diagnosis.long_waits import LongWait, LongWaits
from commlayer.diagnosis.snapshot import rank_log
from commlayer.failures.aborts import SignalAction, speak_before_abort
from commlayer.failures.board import Diagnosed, own_client
from commlayer.failures.detector import FailureDetector
from commlayer.failures.failure_records import PROCESS_ENDED, Asked, Record
from commlayer.failures.waits import within
from commlayer.forked_child import in_forked_child
from commlayer.peer_words import inflated, read_number, read_text, read_words, refusal
from commlayer.profiles.errors import DisagreementError
from commlayer.profiles.files import name_in_files
from commlayer.profiles.printable import printable, say, shortened

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Inquiry", "inquiry_of", "own_answer"]

_GATHER_S = 1.2
"""For how long the logs of the other ranks are waited for."""
_RESULT_S = 2.5
"""For how long a rank that asked too waits for what has been found."""
_AGAIN_S = 20.0
"""Ranks that time out so soon after one another ask about one thing. What a signal has found out
before is too old for them."""
_SIGNALS_S = 2.0
"""The same for signals: somebody sends them to all ranks of a machine, and perhaps again."""
_ONE_SIGNAL_S = 0.5
_STORE_S = 1.0
_LOOK_S = 0.01
_MOST_CALLS = 128
"""The most calls of a log that is told; files have the whole ring."""
_MOST_LOG_BYTES = 4 << 20
"""The most bytes of a log that is told, unpacked: one of a thousand ranks in two hundred groups has
fewer."""
_MOST_TEXT, _MOST_LINE = 1 << 16, 2000
"""The most characters of a diagnosis, and of the line of it that errors say."""
_LINGER_S = 2.0


class _Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result, in the store. ``text``: all of it, which the rank ``printer`` prints; ``line``:
    for errors; ``has_cause``: it names calls that are wrong, and not only a rank that is
    missing."""

    text: str
    line: str
    has_cause: bool
    printer: int


class Inquiry:
    """Asks and answers for this rank, of a job whose ranks are those of ``detector``; ``store`` is
    its own in the job.

    ``folder``: where files go; None: among temporary files. ``long_wait_s``: after so long in one
    call somebody is told for whom it waits; 0: nobody is.
    """

    def __init__(self, detector: FailureDetector, store: Store, folder: str | None, long_wait_s: float = 0.0) -> None:
        self._detector, self._store, self.folder = detector, store, folder
        self.rank, self.ranks = detector.rank, detector.ranks
        self._round = 0
        self._answered_s = -_AGAIN_S
        self._was_timeout = False
        self._lock = threading.Lock()
        self._asking = -1
        self._found = threading.Event()
        self._printed = -1
        """The last round whose result this rank has printed, or has left to another one."""
        self._result = Diagnosed()
        """The finding of the round ``_asking``."""
        self._threads: list[threading.Thread] = []
        detector.knowledge.attach(self)
        self._long_waits = LongWaits(self.rank, long_wait_s, self.waited_long, self.answered_s, detector.numbering)
        if long_wait_s and detector.links is not None:
            detector.links.call_regularly(self._long_waits.look)
        _inquiries.append(self)
        speak_before_abort(self)
        _take_signal(detector)

    # Asking

    def timed_out(self) -> None:
        """A call of this rank has taken too long: ask everybody, and print what is wrong. Returns
        at once."""
        self._ask(is_timeout=True)

    def aborting(self) -> None:
        """This process ends, as Gloo has it end where sizes differ: ask everybody, while their
        calls and its own are known. See :class:`commlayer.failures.aborts.AbortSpeaker`."""
        self._ask(is_timeout=True, reason="abort")
        self.linger()

    def diagnosed(self) -> Diagnosed:
        """The finding of the time when :meth:`timed_out` asked, in a line; without words where
        nothing is known in time."""
        self._found.wait(_RESULT_S)
        return self._result

    def signalled(self) -> None:
        """Print this rank's own log, and ask everybody. Returns at once."""
        log = self._snapshot("signal")
        say(f"SIGUSR1: {log_words(log)}", keep="\n")
        self._ask(is_timeout=False)

    def answered_s(self) -> float:
        """When all ranks were asked last, by ``time.monotonic``."""
        return self._answered_s

    def waited_long(self, wait: LongWait) -> None:
        """A call of this rank has waited for long: ask everybody for whom, and print it, where no
        rank has. Returns at once."""
        self._start(self._ask_once, wait)

    def _ask_once(self, wait: LongWait) -> None:
        """Ask about ``wait``, unless another rank that waits in the same call has."""
        store = _client(self._store)
        if within(_STORE_S, lambda: store.add(f"waits/{wait.claim}", 1)) == 1:
            self._ask(is_timeout=False, reason="asked", wait=wait)

    def _ask(self, *, is_timeout: bool, reason: str = "", wait: LongWait | None = None) -> None:
        """Ask everybody, unless somebody just has: what is found then tells of this too. ``wait``:
        the long wait that is asked about; else all that is found is told."""
        began = time.monotonic()
        with self._lock:
            age_s = began - self._answered_s
            is_same = (age_s < _AGAIN_S and self._was_timeout) if is_timeout else age_s < _SIGNALS_S
            is_same = is_same and wait is None  # the line that is asked for is its own
            asked = self._round - 1 if is_same else self._round
            if asked != self._asking or not self._result.words:
                self._asking, self._result = asked, Diagnosed()
                self._found.clear()
        log = None
        if not is_same:  # else it has been asked already, and this rank has answered
            log = self._answered(reason or ("timeout" if is_timeout else "signal"), asked, is_timeout=is_timeout)
            self._detector.tell(Asked(asked, self.rank, is_timeout))
        self._start(self._lead_or_follow, asked, log, began, wait)

    def observe(self, record: Record) -> None:
        """Answer a question; see :class:`commlayer.failures.knowledge.Observer`."""
        if not isinstance(record, Asked) or record.rank == self.rank:
            return
        with self._lock:
            if record.round < self._round:
                return
        log = self._answered("asked", record.round, is_timeout=record.is_timeout)
        self._start(self._answer, record.round, log)

    def _answered(self, reason: str, asked: int, *, is_timeout: bool) -> RankLog:
        """This rank's log, with which it has answered the question ``asked``."""
        log = self._snapshot(reason)
        with self._lock:
            self._round, self._answered_s, self._was_timeout = asked + 1, time.monotonic(), is_timeout
        return log

    def _snapshot(self, reason: str) -> RankLog:
        known = self._detector.knowledge
        gone = {rank: leaver.why for rank, leaver in list(known.left.items())}
        gone |= dict.fromkeys(list(known.gone), PROCESS_ENDED)
        return rank_log("", self.rank, self.ranks, reason, gone, self._detector.numbering)

    # On threads of their own

    def _start(self, task: Callable[..., None], *args: Any) -> None:
        def run() -> None:
            try:
                task(*args)
            except Exception as error:  # noqa: BLE001  the job's own error must not be hidden by this one
                say(f"rank {self.rank} could not say what it waits for: {error}")

        thread = threading.Thread(target=run, name="commlayer-diagnose", daemon=True)
        with contextlib.suppress(RuntimeError):  # as many threads as may be, or the interpreter is ending
            thread.start()
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def _lead_or_follow(self, asked: int, log: RankLog | None, began: float, wait: LongWait | None = None) -> None:
        """Find out what is wrong, or read what the rank has found that asked first. ``log`` None:
        of this rank it has one."""
        result = Diagnosed()
        try:
            question = _Question(_client(self._store), asked, self.rank, self.ranks)
            is_first = log is not None and question.is_first()
            if log is not None:
                log = question.publish(log)
            diagnosis = question.lead(log, began, wait, self.folder) if is_first and log else question.read()
            result = self._say(asked, diagnosis)
        except Exception as error:  # noqa: BLE001  the store died with the rank that hosts it, or no descriptors are left
            if log is not None:
                is_stores = isinstance(error, (RuntimeError, OSError)) and not isinstance(error, DisagreementError)
                why = "the job's store does not answer" if is_stores else f"nothing was found out, because {error}"
                result = Diagnosed(log_words(log))
                say(f"{why}; {result.words}", keep="\n")
        finally:
            with self._lock:
                if asked == self._asking:  # else another question is newer, whose error this answer does not explain
                    self._result = result if result.words else self._result
                    self._found.set()
        if log is not None:
            _write(log, self.folder)

    def _say(self, asked: int, found: _Found | None) -> Diagnosed:
        """Print what was found, once, if that falls to this rank; the line of it for an error."""
        if found is None:
            return Diagnosed()
        with self._lock:  # one that has answered may then time out itself
            is_mine, self._printed = found.printer == self.rank and asked > self._printed, max(asked, self._printed)
        if is_mine:
            say(found.text, keep="\n")
        line = printable(shortened(found.line, _MOST_LINE), keep="")
        return Diagnosed(f"{line} (rank {found.printer} has printed all of it)", found.has_cause)

    def _answer(self, asked: int, log: RankLog) -> None:
        try:
            question = _Question(_client(self._store), asked, self.rank, self.ranks)
            log = question.publish(log)
            if question.is_lowest(log):
                self._say(asked, question.read())
        finally:
            _write(log, self.folder)

    def close(self) -> None:
        """The job is over: answer nobody any more."""
        self._detector.knowledge.detach(self)
        with contextlib.suppress(ValueError):
            _inquiries.remove(self)
        if _hearing is not None and _hearing.detector is self._detector:
            _hearing.move(_inquiries)

    def linger(self) -> None:
        """Let what has been asked be answered, for two seconds at most, before the process ends."""
        until = time.monotonic() + _LINGER_S
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < until:
            for thread in self._threads:
                thread.join(max(0.0, until - time.monotonic()))


def _client(store: Store) -> Store:
    """A client of the store that nobody else waits on. Raises what the store does, TimeoutError."""
    return within(_STORE_S, lambda: own_client(store))


def _write(log: RankLog, folder: str | None) -> None:
    try:
        write_log(folder_of(log.job or str(os.getpid()), folder), log)
    except OSError as error:
        say(f"rank {log.rank}: its calls could not be written: {error}")


class _Question:
    """A question to all ``ranks``, in the job's ``store``: what they answer, and what the rank has
    found that asked first. This one is ``rank``."""

    def __init__(self, store: Store, number: int, rank: int, ranks: Sequence[int]) -> None:
        self.store, self.number, self.rank, self.ranks = store, number, rank, ranks

    def is_first(self) -> bool:
        """Whether this rank is the first to ask; the first that ever is gives the job its name."""
        is_first = within(_STORE_S, lambda: self.store.add(f"{self.number}/asked", 1)) == 1
        if is_first and not self.store.check(["job"]):
            self.store.set("job", secrets.token_hex(8))
        return is_first

    def is_lowest(self, log: RankLog) -> bool:
        """Whether no lower rank is known to live."""
        return self.rank == min(rank for rank in self.ranks if rank == self.rank or rank not in log.gone)

    def publish(self, log: RankLog) -> RankLog:
        """Put the log into the store; return it with the name of the job. The lowest rank offers to
        print what is found."""
        store = self.store
        if self.is_lowest(log):
            store.set(f"{self.number}/prints", str(self.rank))
        store.set(f"{self.number}/log/{self.rank}", _packed(log))  # type: ignore[arg-type]  # it takes bytes too
        until = time.monotonic() + _STORE_S
        while not store.check(["job"]) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        job = name_in_files(read_text(store.get("job"))) if store.check(["job"]) else ""  # a part of a folder's name
        return msgspec.structs.replace(log, job=job)

    def lead(self, log: RankLog, began: float, wait: LongWait | None, folder: str | None) -> _Found:
        """Find out what is wrong, and put it into the store. Of a long wait this rank prints one
        line."""
        logs, damaged = self._gathered(began, log)
        diagnosis = diagnose(logs)
        unread = "".join(f"\nthe log of rank {rank} cannot be read: {why}" for rank, why in sorted(damaged.items()))
        where = folder_path(log.job, folder)
        printer = self.rank
        if wait is None:
            text = (
                f"rank {self.rank} asked all ranks what they wait for; {len(logs)} of {len(self.ranks)} answered, after "
                f"{time.monotonic() - began:.2f} s:\n{in_words(diagnosis)}{unread}\n"
                f"Each rank's last calls are in {where} of its machine: see `commlayer diagnose`"
            )
            with contextlib.suppress(DisagreementError):  # none has offered to print it, or what it says is no rank
                if self.store.check([f"{self.number}/prints"]):
                    offered = read_number(self.store.get(f"{self.number}/prints"), "the rank that prints")
                    printer = offered if offered in self.ranks else self.rank
        else:
            text = wait_words(log, wait, diagnosis, where) + unread
        text = shortened(text, _MOST_TEXT)
        result = _Found(text, one_line(diagnosis), has_cause=diagnosis.has_cause, printer=printer)
        self.store.set(f"{self.number}/found", msgspec.msgpack.encode(result))  # type: ignore[arg-type]  # bytes too
        return result

    def _gathered(self, began: float, own: RankLog) -> tuple[list[RankLog], dict[int, str]]:
        """The logs of those ranks that answer in time; and why what others have answered is
        none."""
        logs, damaged = {self.rank: as_foreign(own)}, dict[int, str]()
        silent = [rank for rank in self.ranks if rank != self.rank]
        while silent:
            for rank in [rank for rank in silent if self.store.check([f"{self.number}/log/{rank}"])]:
                try:
                    logs[rank] = _unpacked(self.store.get(f"{self.number}/log/{rank}"), rank, self.ranks)
                except DisagreementError as error:  # noqa: PERF203  one such log must not end the diagnosis of all
                    damaged[rank] = str(error)
            silent = [rank for rank in silent if rank not in logs and rank not in damaged]
            if set(silent) <= own.gone.keys() or time.monotonic() - began > _GATHER_S:
                break
            time.sleep(_LOOK_S)
        return list(logs.values()), damaged

    def read(self) -> _Found | None:
        """Wait for what the rank has found that asked first; None: it does not come in time."""
        until = time.monotonic() + _RESULT_S
        while time.monotonic() < until:
            if self.store.check([f"{self.number}/found"]):
                words = self.store.get(f"{self.number}/found")
                result: _Found = read_words(words, _Found, "the rank that asked first")
                return result
            time.sleep(_LOOK_S)
        return None


def _packed(log: RankLog) -> bytes:
    if len(log.calls) > _MOST_CALLS:  # a thread's last call is what it may wait in: it is kept however old it is
        held = {call.thread: call for call in log.calls[:-_MOST_CALLS]}
        recent = log.calls[-_MOST_CALLS:]
        threads = {call.thread for call in recent}
        older = [call for thread, call in held.items() if thread not in threads]
        log = msgspec.structs.replace(log, calls=(*older, *recent))
    return zlib.compress(msgspec.msgpack.encode(log), 1)


def _unpacked(data: bytes, rank: int, ranks: Sequence[int]) -> RankLog:
    """Read the log that ``rank``, of a job of ``ranks``, has packed. Raises DisagreementError."""
    who = f"rank {rank}"
    log: RankLog = read_words(inflated(data, who, _MOST_LOG_BYTES), RankLog, who, _MOST_LOG_BYTES)
    try:
        if (log.rank, log.ranks) != (rank, tuple(ranks)):
            raise ValueError(f"expected its own log, got one of rank {log.rank} of {len(log.ranks)}")
        return as_foreign(log)
    except ValueError as error:
        raise refusal(who, str(error)) from error


# Of this process

_inquiries: list[Inquiry] = []
_hearing: _Hearing | None = None


def inquiry_of(detector: FailureDetector) -> Inquiry | None:
    """The inquiry among the ranks of ``detector``, where there is one."""
    return next((each for each in list(_inquiries) if each._detector is detector), None)


def own_answer() -> RankLog | None:
    """The log with which this rank would answer if it were asked now; None where nobody asks.

    ``job`` is the key of the group that asks where that stands alone: logs of two such groups are
    of two jobs, whose ranks do not know of each other.
    """
    asked = next(iter(list(_inquiries)), None)
    if asked is None:
        return None
    return msgspec.structs.replace(asked._snapshot("asked"), job=asked._detector.numbering)


class _Mouth:
    """The end of a pipe into which faulthandler writes. It alone keeps this: another file in its
    place frees it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def flush(self) -> None:
        return None


class _Hearing:
    """SIGUSR1 as a pipe that the thread of ``detector`` reads. Raises OSError where no descriptors
    are left."""

    def __init__(self, detector: FailureDetector) -> None:
        self.detector = detector
        self._heard_s = -_ONE_SIGNAL_S
        self._ears, self._writes_to = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        mouth = _Mouth(self._writes_to)
        faulthandler.unregister(
            signal.SIGUSR1
        )  # it may think that it is still registered from before another's handler
        self._mouth = weakref.ref(mouth)
        faulthandler.register(signal.SIGUSR1, file=mouth, all_threads=False)
        self._handler = SignalAction(signal.SIGUSR1).handler

    def read(self) -> None:
        """Somebody has sent the signal."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._ears, 1 << 16):
                pass
        if time.monotonic() - self._heard_s > _ONE_SIGNAL_S:  # what one signal writes comes in pieces
            self._heard_s = time.monotonic()
            # One of each numbering: the logs of the job's groups and of one that stands alone have
            # other ranks.
            for each in {each._detector.numbering: each for each in reversed(_inquiries)}.values():
                each.signalled()

    def listen(self) -> bool:
        """Have the detector read. False: it has no thread."""
        with contextlib.suppress(OSError):  # the system watches no more descriptors
            links = self.detector.links
            return links is not None and links.listen(self._ears, self.read)
        return False

    def move(self, inquiries: list[Inquiry]) -> None:
        """The detector ends: have that of another inquiry read; where none is left, let go of the
        signal."""
        if self.detector.links is not None:
            self.detector.links.forget(self._ears)
        for each in list(inquiries):
            self.detector = each._detector
            if self.listen():
                return
        _leave_signal()

    def end(self) -> None:
        """Give SIGUSR1 its default again, and let go of the pipe; what somebody else has put in its
        place stays."""
        is_written = self._mouth() is not None
        if is_written and SignalAction(signal.SIGUSR1).handler != self._handler:
            return  # whoever has taken the signal since may pass it on, into a pipe that must be no other file then
        if is_written:
            faulthandler.unregister(signal.SIGUSR1)
        for descriptor in (self._ears, self._writes_to):
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _is_taken() -> bool:
    """Whether something takes SIGUSR1, or ignores it: handlers in C, as faulthandler's, too."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt:", "SigIgn:"))]
    except (OSError, ValueError, IndexError):
        masks = []
    if len(masks) < 2:  # a system without these lines
        return signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    return any(mask >> (signal.SIGUSR1 - 1) & 1 for mask in masks)


def _take_signal(detector: FailureDetector) -> None:
    """Answer SIGUSR1, on the detector's thread, where nothing else does."""
    global _hearing
    if _hearing is not None or not hasattr(signal, "SIGUSR1"):
        return
    try:
        if _is_taken():
            return
        hearing = _Hearing(detector)
    except OSError as error:  # the job runs without it as well
        say(f"rank {detector.rank} does not answer SIGUSR1: {error}")
        return
    if hearing.listen():
        _hearing = hearing
    else:
        hearing.end()


def _leave_signal() -> None:
    global _hearing
    hearing, _hearing = _hearing, None
    if hearing is not None:
        hearing.end()


@atexit.register
def _linger() -> None:
    for inquiry in _inquiries:
        inquiry.linger()


@in_forked_child
def _forget_inquiries() -> None:
    """A forked child answers for nobody, and has the signal's default again."""
    _inquiries.clear()
    _leave_signal()
