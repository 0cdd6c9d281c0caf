"""The classes of all commands of the program: an option that is given again is refused, where the last would win silently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click

from commlayer.cli.option_types import headings

__all__ = ["RENAMED", "Command", "CommandGroup", "is_repeatable"]

_WHOLE = 1000
RENAMED = {"profile": "measure", "--dispatch": "--exchange"}
"""New names of commands and options by the old ones, which are refused."""


class Command(click.Command):
    """A command of the program, or a program of one command.

    Its options are given once each, but for flags and for those that collect values.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        all_args = list(args)  # click empties what it parses
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            new = RENAMED.get(error.option_name)
            if new is None or all(new not in each.opts for each in self.params):
                raise
            ctx.fail(f"{error.option_name} is called {new} now.")
        if not ctx.resilient_parsing:
            self.refuse_repeated(ctx, all_args)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options under their headings (:func:`commlayer.cli.option_types.in_order`)."""
        rows: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                rows.setdefault(headings.get(parameter, "Options"), []).append(record)
        for heading, each in rows.items():
            with formatter.section(heading):
                formatter.write_dl(each)

    def refuse_repeated(self, ctx: click.Context, args: Sequence[str]) -> None:
        """Parse once more, for the order in which options were given: click keeps only the last value of each."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for parameter, times in Counter(order).items():
            if times > 1 and isinstance(parameter, click.Option) and not is_repeatable(parameter):
                ctx.fail(
                    f"Option {parameter.get_error_hint(ctx)} takes one value, and was given {times} times: give it once."
                )


class CommandGroup(Command, click.Group):
    """A group of commands, whose own are of :class:`Command`."""

    command_class = Command

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options, then the commands."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their first sentences whole: click cuts them where a line ends."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=_WHOLE)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def is_repeatable(option: click.Option) -> bool:
    """Tell whether an option may be given several times: a flag, which says the same again, or one that collects its values."""
    return option.multiple or option.is_flag or option.count
