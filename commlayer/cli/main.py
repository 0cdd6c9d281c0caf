"""The command ``commlayer``: a table of commands, each imported only when it is called.

Offline commands must start in well under half a second, so that nothing here imports more than
click; what a command does when it fails is decided here too, once for all of them.
"""

from __future__ import annotations

import errno
import sys
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from traceback import format_exception
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from commlayer import __version__
from commlayer.cli.commands import RENAMED, CommandGroup
from commlayer.cli.failure import CommandFailure, failure_of, fitting, wants_traceback
from commlayer.cli.standard_streams import make_usable
from commlayer.cli.tables import echo, wrapped
from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["main"]


_SECTIONS = {
    "Commands on a cluster, real or emulated": {
        "demo": "Measure, plan, run and prove it on an emulated cluster.",
        "measure": "Measure the links of a cluster into a profile.",
        "bench": "Run every candidate plan against torch.distributed.",
        "emulate": "Run any program on an emulated multi-node cluster.",
    },
    "Commands about one": {
        "plan": "Choose how to move a collective, and say why.",
        "profiles": "List, show, validate, compare, import and export profiles.",
        "trace": "Merge the traces of a job's ranks, and say what held it up.",
        "audit": "Hold what a job's calls were promised to take against what they took.",
        "routing": "Record how tokens choose experts, and predict other placements of them.",
        "diagnose": "Say who waits for whom in a job that hangs.",
        "doctor": "Check this machine and the environment.",
    },
    "Commands about clusters you need not have": {
        "search": "Find the fastest mappings of a model that fit.",
        "estimate": "Estimate one mapping: time, memory, what it sends.",
        "clusters": "List the clusters that are known.",
        "what-if": "Vary one thing of a job or a cluster, or compare two ways.",
        "models": "List the models that are known.",
    },
}
"""Our commands, each with its help. A command's module has its name, and is imported when it is
called."""
_OURS = {name: words for commands in _SECTIONS.values() for name, words in commands.items()}
_PLUG_INS = "commlayer.commands"
"""The group of entry points, of a click command each, by which other packages add commands."""

_EPILOG = """\
\b
Exit status: 0 done, 1 the surroundings failed, 2 wrong usage or a bad file,
3 a bug of ours. A traceback: --traceback, or COMMLAYER_DEBUG=detail.

\b
Shell completion, also of names of profiles, models and clusters
(zsh and fish likewise):
  eval "$(_COMMLAYER_COMPLETE=bash_source commlayer)"
"""


@cache
def _plug_ins() -> dict[str, EntryPoint]:
    """The commands of other packages that are installed here. Ours are not to be replaced."""
    from importlib.metadata import entry_points  # only where a name is none of ours, or all are listed

    return {point.name: point for point in entry_points(group=_PLUG_INS) if point.name not in _OURS}


class LazyGroup(CommandGroup):
    """A group of commands that knows their names and one-line help without importing them; it turns
    errors into exit statuses.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_OURS, *_plug_ins()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _OURS:
            module = vars(import_module(f"commlayer.cli.{cmd_name.replace('-', '_')}"))
            commands = (each for each in module.values() if isinstance(each, click.Command))
            return next(each for each in commands if each.name == cmd_name)
        point = _plug_ins().get(cmd_name)
        if point is None:
            return None
        of_package = point.dist.name if point.dist is not None else point.module
        try:
            command = point.load()
        except Exception as error:
            raise UsageError(f"{cmd_name}: {of_package} does not load: {error}. Update or uninstall it") from error
        if not isinstance(command, click.Command):
            raise UsageError(
                f"{cmd_name}: expected a click command of {of_package}, got {type(command).__name__}: update or uninstall it"
            )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _OURS and args[0] not in _plug_ins() and args[0][:1].isalnum():
            names = self.list_commands(ctx)
            if args[0] in RENAMED:
                ctx.fail(f"{args[0]} is called {RENAMED[args[0]]} now.")
            close = get_close_matches(args[0], names, n=1, cutoff=0.5)
            hint = f"Did you mean {close[0]!r}?" if close else f"Expected one of {', '.join(names)}."
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        others = {name: f"from {point.module}" for name, point in _plug_ins().items()}
        for title, commands in {**_SECTIONS, "Commands of other packages": others}.items():
            if commands:
                with formatter.section(title):
                    formatter.write_dl(list(commands.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # click's own would import every command for its help
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        items = [CompletionItem(name, help=_OURS.get(name)) for name in names]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def main(self, *args: Any, **extra: Any) -> Any:
        make_usable()
        try:
            return super().main(*args, **extra)
        except OSError as error:  # in what click itself prints, such as --help; of a closed pipe it has heard
            if error.errno == errno.EPIPE or not extra.get("standalone_mode", True):
                raise
            failure = failure_of(error, self)
            failure.show()
            sys.exit(failure.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise
        except click.ClickException as error:  # of click's own, which quotes what was given
            error.message = fitting(printable(error.message))  # type: ignore[misc]  # click itself sets it late in places
            if not isinstance(error, CommandFailure):  # which shows itself
                text = wrapped(error.format_message(), sys.stderr, before=len("Error: "))
                error.format_message = lambda: text  # type: ignore[method-assign]  # of what it adds to its message too
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # click ends quietly: whoever read has seen enough
            name = ctx.invoked_subcommand
            command = self.get_command(ctx, name) if name in _OURS else None
            failure = failure_of(error, command)
            if wants_traceback(ctx):
                echo("".join(format_exception(error)).rstrip(), err=True)
            raise failure from error


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=_EPILOG,
    no_args_is_help=True,
)
@click.option("--traceback", is_flag=True, help="On an error, show where in the code it arose.")
@click.version_option(__version__, prog_name="commlayer", message="%(prog)s %(version)s")
def main(traceback: bool) -> None:
    """Measure what a cluster's links can do, plan collectives for them, and run the plans."""
