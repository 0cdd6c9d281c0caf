"""Options of ``commlayer plan``, and which of them would be ignored beside which others: those are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from commlayer.cli.option_types import BYTES, COUNT, PROFILE, NameOr, RealNumber, in_order
from commlayer.cli.traffic_options import GROUPS
from commlayer.profiles.errors import UsageError
from commlayer.scheduler.decision import Decision, Policy
from commlayer.scheduler.plan import Gather, Strategy
from commlayer.scheduler.traffic import GROUP_COLLECTIVES

__all__ = ["check_strategies", "policy_of", "policy_options", "refuse_ignored", "traffic_options"]

_COLLECTIVES = click.Choice(["all_to_all", *GROUP_COLLECTIVES])
_STRATEGIES = click.Choice([strategy.value for strategy in Strategy])
_CHUNKED = {Strategy.PIPELINED.value, Strategy.PIPELINED_COPY.value, Strategy.RING.value}
_FLAT = {Strategy.FLAT.value, Strategy.DIRECT.value}

traffic_options = in_order(
    click.option(
        "--profile", "-p", "profile_name", type=PROFILE, required=True, help="What the cluster's links can do."
    ),
    click.option("--collective", type=_COLLECTIVES, default="all_to_all", show_default=True, help="What is called."),
    click.option(
        "--group",
        type=NameOr("group", "SHAPE", lambda: GROUPS),
        help="Who calls a collective other than all_to_all; a shape is such as 2x2 or 3+1.  [world]",
    ),
    click.option(
        "--siblings",
        type=COUNT,
        help="Groups of that shape that use a node at the same time.  [as many as its ranks make up]",
    ),
    click.option("--bytes", "-b", "nbytes", type=BYTES, help="Size in nccl-tests' sense: 16MiB, 64KiB, 1.5GB, 256e6."),
    click.option("--batch", type=COUNT, help="In place of --bytes: sequences a rank."),
    click.option("--sequence", type=COUNT, help="… tokens a sequence."),
    click.option("--hidden", type=COUNT, help="… elements a token."),
    click.option("--dtype", default="bf16", show_default=True, help="… type of an element."),
    click.option("--top-k", type=COUNT, default=1, show_default=True, help="… experts a token."),
    click.option("--tp", type=COUNT, help="Ranks of a node that hold the same tokens.  [the whole node]"),
    click.option("--ep", type=COUNT, help="Ranks that exchange tokens.  [one on each node]"),
    click.option("--link", type=click.Choice(["inter", "intra"]), help="What the ep group crosses.  [inter]"),
)
"""Add the options that say what moves, and between whom."""

policy_options = in_order(
    click.option("--strategy", "strategies", type=_STRATEGIES, multiple=True, help="Allow only this; may be repeated."),
    click.option("--max-chunks", type=COUNT, default=32, show_default=True, help="Most chunks of a pipeline."),
    click.option(
        "--gather",
        type=click.Choice([gather.value for gather in Gather]),
        help="What the all_gather moves.  [the profile's]",
    ),
    click.option(
        "--wire", help="Also allow this format between ranks: bf16, int8, fp8_e4m3, bf16+fp8_e4m3; bf16!: no other."
    ),
    click.option("--no-interference", is_flag=True, help="Price resources as if they did not slow each other down."),
    click.option(
        "--tolerance", type=RealNumber(min=0), help="Gain below which the simpler plan stays.  [profile's error]"
    ),
)
"""Add the options that say what may be chosen."""


def policy_of(options: Mapping[str, Any]) -> Policy:
    return Policy(
        strategies=tuple(Strategy(name) for name in options["strategies"]) or tuple(Strategy),
        max_chunks=options["max_chunks"],
        gather=Gather(options["gather"]) if options["gather"] else None,
        interference=not options["no_interference"],
        tolerance=options["tolerance"],
    )


def refuse_ignored(given: Iterable[str], options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that was given and would be ignored; says which, beside what, and what to do."""
    is_sized, strategies = options["nbytes"] is not None, set(options["strategies"])
    is_group = options["collective"] != "all_to_all"
    rules = (
        (
            "siblings",
            not is_group,
            "--siblings is for collectives other than all_to_all, got it with --collective all_to_all, whose groups are --tp and "
            "--ep: leave it out",
        ),
        (
            "group",
            not is_group,
            "--group is for collectives other than all_to_all, got it with --collective all_to_all, whose groups are --tp and "
            "--ep: use those, or --collective all_to_all_v",
        ),
        (
            "top_k",
            is_sized,
            "--top-k is for a size from --batch, --sequence and --hidden, got it with --bytes, which is the whole size: leave it "
            "out",
        ),
        (
            "dtype",
            is_sized and options["wire"] is None,
            "--dtype is for a size from --batch, --sequence and --hidden, or for --wire, got it with --bytes alone: leave it out",
        ),
        (
            "gather",
            is_group,
            "--gather is for --collective all_to_all, got it with another, whose all_gather moves what it must: leave it out",
        ),
        (
            "gather",
            strategies and strategies <= _FLAT,
            "--gather is for strategies that gather, got only flat ones by --strategy: leave it out, or allow hierarchical",
        ),
        (
            "max_chunks",
            strategies and not strategies & _CHUNKED,
            "--max-chunks is for strategies in chunks, got none by --strategy: leave it out, or allow pipelined",
        ),
        (
            "show_all",
            options["as_json"],
            "--all is for the table, got it with --json, which always has every chunk count: leave it out",
        ),
    )
    asked = set(given)
    for name, is_ignored, words in rules:
        if name in asked and is_ignored:
            raise UsageError(words)


def check_strategies(decision: Decision, strategies: Iterable[str]) -> None:
    """Raise UsageError for a strategy that was asked for by name and has no plan here."""
    there = {timeline.plan.strategy.value for timeline in decision.candidates}
    for name in strategies:
        if name not in there:
            is_round = name == Strategy.RING.value and not decision.traffic.slow_pairs
            why = "it goes round slow pairs of nodes, and no pair is slow" if is_round else decision.reason()
            raise UsageError(
                f"--strategy {name}: expected a strategy with a plan for this traffic, got one that has none ("
                f"{decision.unpriced or why}): leave it out"
            )
