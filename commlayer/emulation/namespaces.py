"""Anonymous namespaces: held by file descriptors only, so the kernel takes them back with the last process.

Named ones (`ip netns add`, a file in /var/run/netns) were rejected: they outlive a killed parent, and two clusters
would have to agree on names.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commlayer.emulation import syscalls

__all__ = [
    "RankSpaces",
    "become_root_of_user_namespace",
    "enter",
    "has_capabilities",
    "kill_processes_in",
    "namespace_id",
    "new_network",
    "node_address",
    "node_name",
    "private_hosts_file",
]

_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_KILLING_S = 5.0
"""How long processes are killed that keep forking others."""


@dataclass(frozen=True)
class RankSpaces:
    """File descriptors of the namespaces that a rank enters; no `user_fd` where the parent has the rights itself."""

    net_fd: int
    uts_fd: int
    mount_fd: int
    user_fd: int | None


def node_name(node: int) -> str:
    """Return the host name of a node."""
    return f"node{node}"


def node_address(node: int) -> str:
    """Return the address of a node on the cluster's wire, 10.77.0.1 and on (a /16)."""
    return f"10.77.{(node + 1) // 256}.{(node + 1) % 256}"


def has_capabilities() -> bool:
    """Tell whether this process may make namespaces and set up networks without a user namespace."""
    status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    effective = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff")), 0)
    return all(effective >> capability & 1 for capability in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN))


def become_root_of_user_namespace() -> None:
    """Take all rights inside a new user namespace in which every id means what it meant outside."""
    uid, gid = os.geteuid(), os.getegid()
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    syscalls.make_dumpable()
    Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="utf-8")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="utf-8")


def new_network(hostname: str) -> tuple[int, int]:
    """Move this process into a new network and UTS namespace; returns descriptors of both."""
    syscalls.unshare(syscalls.CLONE_NEWNET | syscalls.CLONE_NEWUTS)
    socket.sethostname(hostname)
    for scope in ("all", "default", "lo"):
        # Router solicitations and link-local addresses would only be noise on a slow wire.
        _set_parameter(f"ipv6/conf/{scope}/disable_ipv6", "1")
    # Linux's default, whatever this machine uses: BBR's probing every few seconds shows in short measurements.
    _set_parameter("ipv4/tcp_congestion_control", "cubic")
    return os.open("/proc/self/ns/net", os.O_RDONLY), os.open("/proc/self/ns/uts", os.O_RDONLY)


def _set_parameter(name: str, value: str) -> None:
    """Set a parameter of this network namespace, where the kernel has it and /proc/sys may be written."""
    with contextlib.suppress(OSError):
        Path(f"/proc/sys/net/{name}").write_text(value, encoding="utf-8")


def private_hosts_file(num_nodes: int) -> int:
    """Move this process into a mount namespace whose /etc/hosts lists the nodes; returns its descriptor.

    The file lives in a tmpfs that is detached right after the bind: nothing on disk can be left behind. (A memfd
    cannot be bind-mounted, its file system belongs to the kernel.)
    """
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.make_mounts_private()
    hosts = Path("/etc/hosts")
    if hosts.exists():
        lines = ["127.0.0.1 localhost", "::ffff:127.0.0.1 localhost"]
        # The mapped form too: torch's sockets are IPv6, and it looks up the names of the addresses that it sees.
        lines += [f"{node_address(node)} {node_name(node)}" for node in range(num_nodes)]
        lines += [f"::ffff:{node_address(node)} {node_name(node)}" for node in range(num_nodes)]
        syscalls.mount_tmpfs("/tmp")
        Path("/tmp/hosts").write_text("\n".join(lines) + "\n", encoding="utf-8")
        syscalls.bind_mount("/tmp/hosts", str(hosts))
        syscalls.unmount("/tmp")
    return os.open("/proc/self/ns/mnt", os.O_RDONLY)


def enter(spaces: RankSpaces) -> None:
    """Move this (single-threaded) process into a node's namespaces; the working directory stays."""
    cwd = os.getcwd()
    if spaces.user_fd is not None:
        syscalls.setns(spaces.user_fd, syscalls.CLONE_NEWUSER)
        syscalls.make_dumpable()
    syscalls.setns(spaces.net_fd, syscalls.CLONE_NEWNET)
    syscalls.setns(spaces.uts_fd, syscalls.CLONE_NEWUTS)
    syscalls.setns(spaces.mount_fd, syscalls.CLONE_NEWNS)
    os.chdir(cwd)


def namespace_id(fd: int) -> str:
    """The kernel's name of a namespace, such as ``net:[4026532287]``."""
    return os.readlink(f"/proc/self/fd/{fd}")


def kill_processes_in(networks: Sequence[str]) -> None:
    """Kill every process but this one in these networks (see `namespace_id`), again until none is left:
    they may fork while we look."""
    deadline, others = time.monotonic() + _KILLING_S, True
    while others and time.monotonic() < deadline:
        others = False
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                is_other = entry.isdigit() and int(entry) != os.getpid()
                if is_other and os.readlink(f"/proc/{entry}/ns/net") in networks:
                    others = True
                    os.kill(int(entry), signal.SIGKILL)
        if others:
            time.sleep(0.002)
