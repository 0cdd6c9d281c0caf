"""``commlayer emulate``: run any torchrun-style program on an emulated cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from commlayer.cli.commands import Command
from commlayer.cli.emulated_device import describe_computation, describe_device
from commlayer.cli.failure import without_field
from commlayer.cli.option_types import COUNT, DELAY_US, NODE_RATE, PAIR_RATE, TIMEOUT_US, PairRate, RealNumber
from commlayer.cli.tables import echo, said_warnings
from commlayer.profiles.counted import counted
from commlayer.profiles.errors import UsageError

if TYPE_CHECKING:
    from commlayer.emulation import EmulatedCluster, RankFailure

__all__ = ["emulate"]

_TIMED_OUT = 124
"""The exit status that timeout(1) has, too."""

_MODES = click.Choice(["auto", "netns", "loopback"])


@click.command(cls=Command, context_settings={"allow_interspersed_args": False})
@click.option("--nodes", default=2, show_default=True, type=COUNT, help="Number of nodes.")
@click.option("--ranks-per-node", default=4, show_default=True, type=COUNT, help="Processes on each.")
@click.option("--inter", metavar="RATE", help="Rate of a node's network interface, each direction: 400mbit, 50mbyte.")
@click.option("--intra", metavar="RATE", help="Rate of a node's loopback, which its ranks share.")
@click.option(
    "--slow-node",
    "slow_nodes",
    type=NODE_RATE,
    multiple=True,
    metavar="NODE:RATE",
    help="Give this node's network interface another rate: 3:100mbit; may be repeated.",
)
@click.option(
    "--slow-pair",
    "slow_pairs",
    type=PAIR_RATE,
    multiple=True,
    metavar="A,B=RATE",
    help="Give the way between two nodes another rate: 0,1=100mbit, or one way 0>1=100mbit; may be repeated.",
)
@click.option("--delay", type=DELAY_US, default=0.0, help="One-way delay between nodes: 100us, 1ms.")
@click.option(
    "--compute",
    metavar="RATE",
    help="Rate of the accelerator that each rank stands for: 4tflops. Products and attention last their FLOPs over it.",
)
@click.option("--memory", metavar="RATE", help="Rate of that accelerator's memory: 3.35tbyte; else it takes no time.")
@click.option(
    "--scale",
    type=RealNumber(1, 1e9),
    default=1.0,
    show_default=True,
    help="Run accelerators and wires so many times slower than the rates say, with so many times the delay.",
)
@click.option(
    "--mode", type=_MODES, default="auto", show_default=True, help="auto: loopback where the machine grants no more."
)
@click.option("--per-node", is_flag=True, help="Start CMD once on each node, for torchrun itself.")
@click.option(
    "--prefix/--no-prefix",
    default=None,
    help="Begin each line that a rank prints with its name, [rank 3].  [prefix, but for a single process]",
)
@click.option("--timeout", type=TIMEOUT_US, help="Kill everything after this time: 90s, 10m.  [never]")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def emulate(
    nodes: int,
    ranks_per_node: int,
    inter: str | None,
    intra: str | None,
    slow_nodes: tuple[tuple[int, str], ...],
    slow_pairs: tuple[PairRate, ...],
    delay: float,
    compute: str | None,
    memory: str | None,
    scale: float,
    mode: str,
    per_node: bool,
    prefix: bool | None,
    timeout: float | None,
    command: tuple[str, ...],
) -> None:
    """Run any program on an emulated multi-node cluster.

    Each node is a network namespace with its own host name, each rank a process with the
    environment that torchrun would give it. The bytes are real, only the wires are slow.

    \b
      commlayer emulate --nodes 2 --ranks-per-node 4 --inter 400mbit -- python train.py
      commlayer emulate --per-node -- torchrun --nproc-per-node 4 train.py
      commlayer emulate --compute 4tflops --inter 40gbit --scale 100 -- python train.py

    With --compute each rank stands for an accelerator: computation takes that device's time, and no
    core. What ran is said at the end, also how much of it this machine ended too late; --scale
    gives it more time.

    Exit status: that of the first process that failed, 124 if the time was up, 0 if all went well.
    Which ranks failed, how, and the error that they said last, is told on stderr.
    """
    if compute is None and (memory is not None or scale != 1):
        raise UsageError(
            "--memory and --scale are of the accelerator whose rate --compute gives: add it, such as --compute 4tflops"
        )
    from commlayer.emulation import EmulatedCluster

    links: dict[str, Any] = {"inter": inter, "intra": intra, "delay_us": delay, "mode": mode}
    with said_warnings("commlayer emulate: "):
        built = EmulatedCluster(nodes, ranks_per_node, **links, compute=compute, memory=memory, scale=scale)
    with built as cluster:
        slow = _slowed(cluster, slow_nodes, slow_pairs)
        device = describe_device(cluster.accelerator)
        _say(_describe(cluster.shaped, nodes, ranks_per_node, inter, intra, delay) + slow + device)
        if prefix is None:
            prefix = nodes * (1 if per_node else ranks_per_node) > 1
        began_s = time.perf_counter()
        status = _run(cluster, command, None if timeout is None else timeout / 1e6, per_node=per_node, prefix=prefix)
        if cluster.accelerator is not None:
            took_s = time.perf_counter() - began_s
            _say(describe_computation(cluster.accelerator, cluster.device_reports, cluster.world_size, took_s))
    sys.exit(status)


def _slowed(cluster: EmulatedCluster, slow_nodes: Sequence[tuple[int, str]], slow_pairs: Sequence[PairRate]) -> str:
    """Give nodes' interfaces, and the ways between two nodes, other rates, and say which.

    Raises UsageError naming the option; RightsError where nothing is shaped.
    """
    words, option = "", ""
    try:
        for node, rate in slow_nodes:
            option = f"--slow-node {node}:{rate}"
            if not 0 <= node < cluster.nodes:
                raise UsageError(f"expected a node of 0 to {cluster.nodes - 1}, got {node}")
            cluster.shape(inter=rate, node=node)
            words += f", node {node} inter {rate}"
        for pair in slow_pairs:
            option = f"--slow-pair {pair}"
            cluster.shape_pair(pair.sender, pair.receiver, pair.rate, is_one_way=pair.is_one_way)
            first, joint = ("from node", "to") if pair.is_one_way else ("between nodes", "and")
            words += f", {first} {pair.sender} {joint} {pair.receiver} {pair.rate}"
    except UsageError as error:
        raise UsageError(f"{option}: {without_field(error)}") from error
    return words


def _run(
    cluster: EmulatedCluster, command: Sequence[str], timeout_s: float | None, *, per_node: bool, prefix: bool
) -> int:
    """The exit status; who failed has been said."""
    from commlayer.emulation import RanksFailedError, RanksTimedOutError, exit_status
    from commlayer.emulation.output import error_line

    try:
        return cluster.command(command, timeout_s=timeout_s, per_node=per_node, prefix=prefix, check=True)
    except RanksTimedOutError as error:
        _say(str(error))
        return _TIMED_OUT
    except RanksFailedError as error:
        # The ranks that failed by themselves, in the order of time, each with the line of its
        # stderr that says its error, or the last one, of which all has been passed on; then those
        # that were ended for it.
        lines = []
        for failure in error.failures:
            if not failure.by_cluster:
                said = error_line(failure.traceback)
                lines.append(f"{_name(failure, per_node)} {failure.reason}{'; it said:' if said else ''}")
                lines += [f"    {said}"] if said else []
        if ended := [failure for failure in error.failures if failure.by_cluster]:
            lines.append(f"{', '.join(_name(failure, per_node) for failure in ended)}: {ended[0].reason}")
        _say("\n".join(lines))
        return exit_status(error.failures)


def _name(failure: RankFailure, per_node: bool) -> str:
    return f"node {failure.node}" if per_node else f"rank {failure.rank} (node {failure.node})"


def _say(words: str) -> None:
    """On stderr: stdout belongs to the program that runs."""
    echo(f"commlayer emulate: {words}", err=True)


def _describe(shaped: bool, nodes: int, ranks_per_node: int, inter: str | None, intra: str | None, delay: float) -> str:
    shape = f"{nodes} x {counted(ranks_per_node, 'rank')}"
    if not shaped:
        return f"{shape} on loopback, with a declared topology and no shaping: do not compare times"
    words = [
        f"{name} {rate} a node" if rate else f"{name} unshaped" for name, rate in (("inter", inter), ("intra", intra))
    ]
    words += [f"delay {delay:g} µs"] if delay else []
    return f"{shape} in network namespaces, {', '.join(words)}"
