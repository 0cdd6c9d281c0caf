"""The moment between SIGTERM and the end: who has failed is said in it, and nothing of the program's own is changed by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from commlayer.failures.news import FailureNews

_SPEAKER = """
import os, signal, sys, threading
from commlayer.failures.last_words import speak_before_sigterm

class Speaker:
    def last_words(self):
        print("rank 2 died", flush=True)

def send():
    os.kill(os.getpid(), signal.SIGTERM)

speaker = Speaker()
"""


def run(program: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", _SPEAKER + textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def test_it_speaks_and_then_ends_by_the_signal_also_where_the_main_thread_waits() -> None:
    program = """
        speak_before_sigterm(speaker)
        speak_before_sigterm(speaker)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "trainers look whether there is a handler"
        lock = threading.Lock()
        lock.acquire()
        threading.Timer(0.01, send).start()
        lock.acquire()
    """
    assert run(program) == (-signal.SIGTERM, "rank 2 died\n")


@pytest.mark.parametrize(
    "order", ["handler(); speak_before_sigterm(speaker)", "speak_before_sigterm(speaker); handler()"]
)
def test_a_handler_of_the_program_counts(order: str) -> None:
    program = f"""
        def handler():
            signal.signal(signal.SIGTERM, lambda number, frame: print("mine", flush=True))
        {order}
        send()
        print("goes on")
    """
    assert run(program) == (0, "mine\ngoes on\n")


@pytest.mark.parametrize("way", ["SIG_IGN", "SIG_DFL"])
def test_a_program_that_ignores_the_signal_or_takes_the_systems_way_again_is_left_alone(way: str) -> None:
    program = f"""
        speak_before_sigterm(speaker)
        signal.signal(signal.SIGTERM, signal.{way})
        send()
        print("goes on")
    """
    assert run(program) == ((0, "goes on\n") if way == "SIG_IGN" else (-signal.SIGTERM, ""))


def test_a_forked_child_ends_at_once_and_not_its_parent() -> None:
    program = """
        speak_before_sigterm(speaker)
        child = os.fork()
        if child == 0:
            send()
            os._exit(3)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status))
    """
    assert run(program) == (0, f"{-signal.SIGTERM}\n")


def test_at_the_programs_end_the_signal_is_the_systems_again() -> None:
    program = """
        import atexit
        import faulthandler
        atexit._clear()
        from commlayer.failures import last_words
        speak_before_sigterm(speaker)
        last_words._step_aside()
        print(faulthandler.unregister(signal.SIGTERM))
        send()
    """
    assert run(program) == (-signal.SIGTERM, "False\n")


def test_what_is_held_is_given_back_when_nobody_is_left_to_speak() -> None:
    program = """
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(3):
            from commlayer.failures.last_words import say_nothing_more
            speak_before_sigterm(speaker)
            (reader,) = [each for each in threading.enumerate() if each.name == "commlayer-sigterm"]
            say_nothing_more(speaker)
            say_nothing_more(speaker)
            reader.join()
            assert sorted(os.listdir("/proc/self/fd")) == before
        send()
    """
    assert run(program) == (-signal.SIGTERM, "")


def test_whatever_its_speakers_raise_the_process_ends() -> None:
    program = """
        class Broken:
            def last_words(self):
                raise ValueError
        broken = Broken()
        speak_before_sigterm(broken)
        threading.Timer(0.01, send).start()
        threading.Event().wait()
    """
    assert run(program) == (-signal.SIGTERM, "")


def test_the_first_failure_is_printed_and_before_it_one_consequence(capsys: pytest.CaptureFixture[str]) -> None:
    news = FailureNews(0)
    news.heard("rank 1", "left with PeerError: rank 3 …", is_consequence=True)
    news.heard("rank 2", "left with PeerError: rank 3 …", is_consequence=True)
    assert not news.has_heard
    news.heard("rank 3", "died: its process has ended\x1b[2J (seen by rank 1)")
    news.heard("rank 4", "died: its process has ended (seen by rank 1)")
    news.await_printed(60)
    assert capsys.readouterr().err.splitlines()[-1] == (
        "commlayer: rank 0: rank 3 died: its process has ended\\x1b[2J (seen by rank 1). Look at the log of rank 3"
    )


_JOB = """
import os, signal
import torch, torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("commlayer")
x = torch.ones(1 << 10)
for k in range(1 << 30):
    dist.all_reduce(x)
    if k == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.cluster
def test_under_torchrun_the_survivors_logs_name_who_died(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(_JOB, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--log-dir", "logs", "-r", "3"]
    done = subprocess.run(
        [*torchrun, "job.py"],
        cwd=tmp_path,
        env=os.environ | {"COMMLAYER_PROFILE": "none", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "exitcode  : -9" in done.stderr, "torchrun goes on as ever"
    logs = {path.parent.name: path.read_text(encoding="utf-8") for path in (tmp_path / "logs").rglob("stderr.log")}
    survivors = [logs[rank] for rank in ("0", "2")]
    assert all("rank 1 died" in log for log in survivors), survivors
