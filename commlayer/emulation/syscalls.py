"""The few system calls that Python 3.10 does not offer: unshare, setns, mount, umount2, prctl.

`os.unshare` and `os.setns` exist from Python 3.12; ctypes serves every supported version alike.
"""

from __future__ import annotations

import ctypes
import os
import warnings

__all__ = [
    "CLONE_NEWNET",
    "CLONE_NEWNS",
    "CLONE_NEWUSER",
    "CLONE_NEWUTS",
    "bind_mount",
    "die_with_parent",
    "flush_c_stdio",
    "fork",
    "make_dumpable",
    "make_mounts_private",
    "mount_tmpfs",
    "set_timer_slack_ns",
    "setns",
    "unmount",
    "unshare",
]

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_SLAVE = 1 << 19
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_TIMERSLACK = 29
_SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")


def unshare(flags: int) -> None:
    """Move the calling process into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    """Move the calling thread into the namespace that `fd` refers to."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), f"setns({kind:#x})")


def _mount(source: str | None, target: str, fstype: str | None, flags: int) -> None:
    def encode(text: str | None) -> bytes | None:
        return None if text is None else os.fsencode(text)

    result = _libc.mount(encode(source), os.fsencode(target), encode(fstype), ctypes.c_ulong(flags), None)
    _check(result, f"mount on {target}")


def make_mounts_private() -> None:
    """Keep the mounts of this namespace to itself (slave: the machine's own later mounts still appear here)."""
    _mount(None, "/", None, _MS_SLAVE | _MS_REC)


def mount_tmpfs(target: str) -> None:
    """Mount an empty tmpfs."""
    _mount("tmpfs", target, "tmpfs", 0)


def bind_mount(source: str, target: str) -> None:
    """Show `source` at `target`."""
    _mount(source, target, None, _MS_BIND)


def unmount(target: str) -> None:
    """Detach the mount from the tree; what is bound elsewhere stays."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(_MNT_DETACH)), f"umount {target}")


def _prctl(option: int, value: int) -> None:
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), 0, 0, 0), f"prctl({option})")


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the thread that forked us ends; die now if it is gone already."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def make_dumpable() -> None:
    """Undo the mark that entering a user namespace leaves, so that /proc/self stays ours."""
    _prctl(_PR_SET_DUMPABLE, 1)


def set_timer_slack_ns(slack_ns: int) -> None:
    """Set how late the kernel may wake this thread from a timed wait (50 µs by default)."""
    _prctl(_PR_SET_TIMERSLACK, slack_ns)


def fork() -> int:
    """Fork as `os.fork` does, without the warning that Python 3.12 raises in a parent with threads.

    Where warnings are errors it would be raised after the fork, and nobody would know the child's number. The children
    of this package run Python code of their own and whatever the caller gives them; that the caller's threads hold no
    lock which that code needs is the caller's part (docs/emulation.md).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def flush_c_stdio() -> None:
    """Flush C's own buffers, so that a forked copy cannot print them twice."""
    _libc.fflush(None)
