"""A process that aborts: what it says before, and that it ends as it would have."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

SPEAKER = """
import faulthandler, os, signal, sys, threading, time
from commlayer.failures import aborts

class Speaker:
    def aborting(self):
        print("spoken", flush=True)
        BODY

speaker = Speaker()
"""
SPEAKS = "aborts.speak_before_abort(speaker)\n"


def run(program: str, body: str = "pass") -> subprocess.CompletedProcess[str]:
    text = textwrap.dedent(SPEAKER).replace("BODY", body) + program
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)


def test_a_process_that_aborts_speaks_and_then_ends_as_it_would_have() -> None:
    ended = run(SPEAKS + "os.abort()")
    assert (ended.returncode, ended.stdout) == (-signal.SIGABRT, "spoken\n")


def test_a_thread_that_python_has_not_made_may_abort() -> None:
    """Gloo has such threads."""
    ended = run(
        SPEAKS + "import ctypes; libc = ctypes.CDLL(None); thread = ctypes.c_ulong()\n"
        "libc.pthread_create(ctypes.byref(thread), None, libc.abort, None); time.sleep(60)"
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGABRT, "spoken\n")


def test_what_was_there_before_has_its_turn() -> None:
    ended = run("faulthandler.enable()\n" + SPEAKS + "os.abort()")
    assert (ended.returncode, ended.stdout) == (-signal.SIGABRT, "spoken\n")
    assert "Fatal Python error: Aborted" in ended.stderr


def test_who_never_ends_is_ended() -> None:
    ended = run("aborts._LONGEST_S = 1\n" + SPEAKS + "os.abort()", body="threading.Event().wait()")
    assert (ended.returncode, ended.stdout) == (-signal.SIGALRM, "spoken\n")


def test_an_error_of_a_speaker_changes_nothing() -> None:
    ended = run(SPEAKS + "os.abort()", body="raise ValueError")
    assert (ended.returncode, ended.stdout) == (-signal.SIGABRT, "spoken\n")


@pytest.mark.parametrize(
    "program",
    [
        "signal.signal(signal.SIGABRT, lambda *_: os._exit(3))\n" + SPEAKS + "os.kill(os.getpid(), signal.SIGABRT)\n",
        SPEAKS + "signal.signal(signal.SIGABRT, lambda *_: os._exit(3))\nos.kill(os.getpid(), signal.SIGABRT)\n",
    ],
    ids=["before", "after"],
)
def test_a_handler_of_the_program_stays(program: str) -> None:
    ended = run(program + "time.sleep(60)")
    assert (ended.returncode, ended.stdout) == (3, "")


def test_a_forked_child_says_nothing() -> None:
    ended = run(
        SPEAKS + "child = os.fork()\nif child == 0: os.abort()\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)\nos.abort()"
    )
    assert ended.stdout == f"{-signal.SIGABRT}\nspoken\n"
