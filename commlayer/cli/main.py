"""The command ``commlayer``: a table of commands, each imported only when it is called.

Offline commands must start in well under half a second, so that nothing here imports more than click; what a command
does when it fails is decided here too, once for all of them.
"""

from __future__ import annotations

import errno
import sys
from difflib import get_close_matches
from importlib import import_module
from traceback import format_exception
from typing import Any, NamedTuple

import click
from click.shell_completion import CompletionItem

from commlayer import __version__
from commlayer.cli.commands import CommandGroup
from commlayer.cli.failure import failure_of, fitting, wants_traceback
from commlayer.cli.standard_streams import make_usable
from commlayer.cli.tables import echo
from commlayer.profiles.printable import printable

__all__ = ["main"]


class _Entry(NamedTuple):
    module: str
    attribute: str
    help: str


_CLUSTER = {
    "demo": _Entry("commlayer.cli.demo", "demo", "Measure, plan, run and prove it on an emulated cluster."),
    "profile": _Entry("commlayer.cli.profile", "profile", "Measure the links of a cluster into a profile."),
    "bench": _Entry("commlayer.cli.bench", "bench_command", "Run every candidate plan against torch.distributed."),
    "emulate": _Entry("commlayer.cli.emulate", "emulate", "Run any program on an emulated multi-node cluster."),
}
_OFFLINE = {
    "plan": _Entry("commlayer.cli.plan", "plan", "Choose how to move a collective, and say why."),
    "profiles": _Entry(
        "commlayer.cli.profiles", "profiles", "List, show, validate, compare, merge, import and export profiles."
    ),
    "trace": _Entry("commlayer.cli.trace", "trace", "Merge the traces of a job's ranks, and say what held it up."),
    "audit": _Entry(
        "commlayer.cli.audit", "audit_command", "Hold what a job's calls were promised to take against what they took."
    ),
    "routing": _Entry(
        "commlayer.cli.routing", "routing", "Record how tokens choose experts, and predict other placements of them."
    ),
    "diagnose": _Entry("commlayer.cli.diagnose", "diagnose_command", "Say who waits for whom in a job that hangs."),
    "doctor": _Entry("commlayer.cli.doctor", "doctor", "Check this machine and the environment."),
}
_MAPPINGS = {
    "search": _Entry("commlayer.cli.search", "search_command", "Find the fastest mappings of a model that fit."),
    "estimate": _Entry(
        "commlayer.cli.estimate", "estimate_command", "Estimate one mapping: time, memory, what it sends."
    ),
    "what-if": _Entry(
        "commlayer.cli.what_if", "what_if_command", "Vary one thing of a job or a cluster, or compare two ways."
    ),
    "long-context": _Entry(
        "commlayer.cli.long_context", "long_context", "Lay experts and context out from 4K to 1M tokens."
    ),
}
_SECTIONS = {
    "Commands on a cluster, real or emulated": _CLUSTER,
    "Commands about one": _OFFLINE,
    "Commands about clusters you need not have": _MAPPINGS,
}
_COMMANDS = {**_CLUSTER, **_OFFLINE, **_MAPPINGS}

_EPILOG = """\
\b
Exit status: 0 done, 1 the surroundings failed, 2 wrong usage or a bad file,
3 a bug of ours. A traceback: --traceback, or COMMLAYER_DEBUG=detail.

\b
Shell completion, also of names of profiles, models and clusters
(zsh and fish likewise):
  eval "$(_COMMLAYER_COMPLETE=bash_source commlayer)"
"""


class LazyGroup(CommandGroup):
    """A group of commands that knows their names and one-line help without importing them; it turns errors into exit
    statuses.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(import_module(entry.module), entry.attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and args[0][:1].isalnum():
            close = get_close_matches(args[0], _COMMANDS, n=1, cutoff=0.5)
            hint = f"Did you mean {close[0]!r}?" if close else f"Expected one of {', '.join(_COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in _SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, entry.help) for name, entry in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        # click's own would import every command for its help
        found = [
            CompletionItem(name, help=entry.help) for name, entry in _COMMANDS.items() if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

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
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # click ends quietly: whoever read has seen enough
            name = ctx.invoked_subcommand
            command = self.get_command(ctx, name) if name else None
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
