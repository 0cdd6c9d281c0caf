"""The classes of all commands of the program: an option that is given again is refused, where the last would win silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click

__all__ = ["Command", "Group", "is_repeatable"]


class _OnceEach(click.Command):
    """A command whose options are given once each, but for flags and for those that collect values."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)  # click empties what it parses
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            self.refuse_repeated(ctx, given)
        return rest

    def refuse_repeated(self, ctx: click.Context, args: Sequence[str]) -> None:
        """Parse once more, for the order in which options were given: click keeps only the last value of each."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for parameter, times in Counter(order).items():
            if times > 1 and isinstance(parameter, click.Option) and not is_repeatable(parameter):
                ctx.fail(
                    f"Option {parameter.get_error_hint(ctx)} takes one value, and was given {times} times: give it once."
                )


class Command(_OnceEach):
    """A command of the program, or a program of one command."""


class Group(_OnceEach, click.Group):
    """A group of commands, whose own are of :class:`Command`."""

    command_class = Command


def is_repeatable(option: click.Option) -> bool:
    """Tell whether an option may be given several times: a flag, which says the same again, or one that collects its values."""
    return option.multiple or option.is_flag or option.count
