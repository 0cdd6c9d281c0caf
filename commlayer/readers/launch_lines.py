"""A launch line of a trainer as the options of ``commlayer estimate``: the inverse of its export.

Only what a mapping, a batch or software depends on is read; the other flags are named, so that nobody takes them for read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from commlayer.profiles.errors import UsageError
from commlayer.profiles.printable import shortened
from commlayer.readers.launch_flags import ON_LINE, LaunchFormat, is_assigned, read_flags
from commlayer.readers.launch_variables import flags_of_commands, unread_expansion, variables_of
from commlayer.readers.megatron_args import MEGATRON_ARGS
from commlayer.readers.torchtitan_args import TORCHTITAN_ARGS, is_torchtitan, with_configuration
from commlayer.scheduler.mapping.model import ModelShape

__all__ = ["Launch", "read_launch"]


@dataclass(frozen=True)
class Launch:
    """A launch line that was read.

    Attributes:
        options: of the command, by the names of its parameters.
        shape: fields of the model's.
        changing: flags that change the step, and are not read.
        unread: flags that nothing here depends on, or that nobody knows.
        remarks: where an option is the nearest thing, and not the same.
        misspelt: those of them that are nearly the name of a flag that is known, in a question.
        unknown: variables of the shell in the place of flags, which the text does not assign.
    """

    options: Mapping[str, object]
    shape: Mapping[str, str]
    changing: tuple[str, ...]
    unread: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    misspelt: tuple[str, ...] = ()

    def check(self, model: ModelShape) -> None:
        """Raises UsageError where the line is of another model."""
        for name, value in self.shape.items():
            if value != str(getattr(model, name)):
                raise UsageError(
                    f"the launch line is of a model with {name}={shortened(value)}, but {model.name} has "
                    f"{getattr(model, name)}: name the model that it trains with --model"
                )

    def notes(self) -> Iterator[str]:
        """The flags that were not read, where there are any."""
        yield from self.misspelt
        yield from self.remarks
        if self.changing:
            yield f"not read of the launch line, although the step changes with them: {', '.join(self.changing)}"
        if self.unknown:
            yield f"not read, as the text does not say what they hold: {', '.join(self.unknown)}: write their flags out"
        if self.unread:
            yield f"not read of the launch line, as nothing here depends on them or knows them: {', '.join(self.unread)}"


def read_launch(text: str, environment: Mapping[str, str] | None = None) -> Launch:
    """Read a launch line, with its continuation lines, quotes and comments; what comes before its first flag is skipped.

    A variable of the shell stands for what ``text`` assigns to it, else for what ``environment`` has.

    Raises UsageError for quotes that do not end, a line without flags, a variable without a value, a configuration that cannot
    be read, several launch lines that differ, flags of a mapping in another command, and for what this planner does not model.
    """
    import difflib

    variables = variables_of(text, environment or {})
    flags, expanded = read_flags(text, variables)
    if is_torchtitan(text, flags):
        launch_format: LaunchFormat = TORCHTITAN_ARGS
        flags = with_configuration(text, flags, variables)
    elif "tensor-model-parallel-size" in flags or "micro-batch-size" in flags:
        launch_format = MEGATRON_ARGS
    else:
        raise UsageError(
            "expected a launch line of Megatron-LM, such as torchrun … pretrain_gpt.py --tensor-model-parallel-size 2 "
            "--micro-batch-size 1, or of torchtitan, such as torchrun … -m torchtitan.train --job.config_file model.toml, got "
            f"{', '.join(f'--{shortened(name)}' for name in list(flags)[:5]) or 'no flag'}"
        )
    _refuse_other_commands(text, launch_format)
    options = dict(launch_format.options(flags))
    shape = launch_format.shape(flags)
    known, beyond = (
        {*launch_format.read, *launch_format.changing},
        {*launch_format.changing, *launch_format.unlike(flags)},
    )
    unread = [name for name in flags if name not in beyond and name not in launch_format.read]
    # Behind switches, whose values nobody asks for, only the shell knows what its variables hold.
    for name in flags:
        if name in known and name not in flags.asked:
            expanded += filter(unread_expansion, flags[name])
    misspelt = []
    for name in unread:
        # A flag with another number or another ``no-`` says something else, however alike.
        said, origin = (re.findall(r"\d+", name), name.startswith("no-")), flags.origin(name)
        alike = [flag for flag in sorted(known) if (re.findall(r"\d+", flag), flag.startswith("no-")) == said]
        for close in difflib.get_close_matches(name, alike, n=1, cutoff=_ALIKE):
            meant = f"--{close}" if origin.startswith("--") else close
            misspelt.append(f"{origin} is not read: did you mean {meant}?")
    return Launch(
        options,
        shape,
        tuple(flags.origin(name).removesuffix(ON_LINE) for name in flags if name in beyond),
        tuple(dict.fromkeys(flags.origin(name).removesuffix(ON_LINE) for name in unread)),
        tuple(shortened(word) for word in dict.fromkeys(expanded) if not is_assigned(word, text)),
        launch_format.remarks(flags),
        tuple(misspelt),
    )


def _refuse_other_commands(text: str, launch_format: LaunchFormat) -> None:
    """Raises UsageError where a script has launch lines that differ in what is read, or another command with such flags."""
    commands = [
        (is_launch, word, {name: value for name, value in flags.items() if name in launch_format.read})
        for is_launch, word, flags in flags_of_commands(text)
    ]
    launches = [flags for is_launch, _, flags in commands if is_launch]
    if any(flags != launches[0] for flags in launches):
        raise UsageError(f"expected one launch line, got {len(launches)} that differ: leave the one that is meant")
    for is_launch, word, flags in commands:
        if launches and not is_launch and flags:
            raise UsageError(
                f"--{next(iter(flags))}: expected it in the launch line, got it behind {shortened(word)}, another command: "
                "leave the launch line and what it needs"
            )


_ALIKE = 0.89
"""How alike two flags are of which one may be the other, misspelt: more than --ffn-hidden-size and --moe-ffn-hidden-size."""
