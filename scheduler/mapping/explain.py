"""Why a setup wins: against the runner-up and against the best without folding, in milliseconds and in words; and why more
GPUs make a job more than so many times as fast."""

from __future__ import annotations

from collections.abc import Mapping

from commlayer.scheduler.mapping.job import Setup
from commlayer.scheduler.mapping.result import StepEstimate, describe_memory, describe_validity
from commlayer.scheduler.mapping.search import SearchResult

__all__ = ["compare_estimates", "explain", "why_more_than_in_proportion"]

_SHOWN = 3  # parts that are named on each side of a comparison
_LEAST = 0.001  # of the slower step: what is below is not worth a word
_WORDS = {
    "attention": "attention",
    "experts": "the experts' products",
    "dense": "dense products",
    "memory": "work that memory bounds",
    "head": "the head and the loss",
    "recompute": "recomputation",
    "dispatch": "sending tokens to experts",
    "combine": "bringing tokens back",
    "tp": "tp exchanges",
    "cp": "cp exchanges",
    "pp": "pp exchanges",
    "gradients": "gradients that nothing hides",
    "parameters": "gathers of parameters that nothing hides",
    "offload": "activations' way to the host and back",
    "bubble": "waiting in the pipeline",
    "optimizer": "the optimizer",
}
_DEGREES = ("tp", "cp", "ep", "etp", "pp", "vpp")


def explain(result: SearchResult) -> list[str]:
    """Why the best is the best, a line for each reason: what it is, the runner-up, the best of the other kind of mapping,
    what it waits for, and how much memory is left."""
    best = result.best
    lines = [
        f"{best.setup} takes {_ms(best.step_us)} a step on {best.cluster} ({best.software}): MFU {best.mfu:.1%}, "
        f"{best.tokens_per_s:,.0f} tokens/s."
    ]
    if len(result.kinds) > 1:
        kind, its_best = list(result.kinds.items())[1]
        lines.append(f"Against the best with {kind}, {compare_estimates(best, its_best)}")
    elif len(result.ranked) > 1:
        lines.append(f"Against the runner-up, {compare_estimates(best, result.ranked[1])}")
    elif result.top == 1:
        lines.append("Of a runner-up nothing is known: only the fastest was asked for.")
    else:
        lines.append("There is no runner-up: nothing else fits.")
    other = result.best_unfolded if best.setup.folded else result.best_folded
    kind_word = "unfolded" if best.setup.folded else "folded"
    compared = [*list(result.kinds.values())[1:2], *result.ranked[1:2]]
    if other is None:
        lines.append(f"No {kind_word} mapping was searched that fits.")
    elif compared and other.setup == compared[0].setup:
        lines.append(f"That is also the best {kind_word} one.")
    else:
        lines.append(f"Against the best {kind_word} one, {compare_estimates(best, other)}")
    exposed = sorted(((us, lane) for lane, us in best.exposed_us.items() if us > 0), reverse=True)
    waits = ", then ".join(f"{name} ({_ms(us)})" for name, us in best.waits_us.items())
    if exposed:
        total, lanes = sum(us for us, _ in exposed), [f"{lane} {_ms(us)}" for us, lane in exposed]
        lines.append(
            f"It waits longest for {waits}; {_ms(total)} of communication ({total / best.step_us:.1%}) is "
            f"hidden by nothing: {_and(lanes)}."
        )
    else:
        lines.append(f"All communication is hidden{f'; it waits for {waits}' if waits else ''}.")
    used, limit = best.memory.total, best.memory_limit
    lines.append(
        f"The fullest GPU has {used / 1e9:.1f} of {limit / 1e9:.1f} GB in use ({describe_memory(best.memory)}): "
        f"{(limit - used) / 1e9:.1f} GB ({1 - used / limit:.0%}) are left."
        + (f" A margin of {result.margin:.0%} was to be left." if result.margin else "")
    )
    return [*lines, *_alike(result)]


def _alike(result: SearchResult) -> list[str]:
    """The sentences on mappings that only rename an axis, on how sure the best's time is, and on those
    that are equal to it within what is known."""
    lines = []
    if count := sum(map(len, result.variants.values())):
        names = ", ".join(map(str, result.variants.get(result.best.setup, ())))
        of_best = f"; of the best: {names}" if names else ""
        lines.append(f"{count} more only rename an axis of these, and are not ranked{of_best}.")
    lines += describe_validity(result.best)[:1]
    first, *others = result.equal
    if others and result.best.validity is not None:
        numbers = _and([str(number) for number in others])
        which = f"number {numbers}" if len(others) == 1 else f"numbers {numbers}"
        lines.append(
            f"Within what is known number {first} is no faster than {which} of "
            f"these {len(result.shown)}, whose intervals meet its own: choose by a run of each, or what is simpler or takes less "
            "memory."
        )
    return lines


def compare_estimates(faster: StepEstimate, slower: StepEstimate) -> str:
    """Compare two estimates: what one saves and what it costs, the largest parts first."""
    saved_us = slower.step_us - faster.step_us
    differences = _differences(_parts(faster), _parts(slower))
    least = _LEAST * slower.step_us
    saves = [f"{_ms(us)} on {_words(name)}" for us, name in differences if us > least][:_SHOWN]
    costs = [f"{_ms(-us)} on {_words(name)}" for us, name in differences if us < -least][:_SHOWN]
    change = _changes(faster.setup, slower.setup)
    gain = f"it is {saved_us / slower.step_us:.1%} ({_ms(saved_us)}) faster"
    if saved_us < _LEAST * slower.step_us:
        gain = f"it is as fast to {_LEAST:.1%}" if saved_us > 0 else "it is as fast, and simpler"
    said = f"{slower.setup} ({_ms(slower.step_us)}), {gain}"
    if saves:
        said += f": with {change} a step spends less: {_and(saves)}" + (f"; and more: {_and(costs)}" if costs else "")
    elif costs:
        said += f": with {change} a step spends more: {_and(costs)}, and small savings make up for it"
    else:
        said += f": {change}; no part of the step differs by {_LEAST:.1%}"
    return f"{said}."


def why_more_than_in_proportion(fewer: StepEstimate, more: StepEstimate) -> str:
    """Say on what a token takes less of a GPU's time on more GPUs; empty where they are no more than so many times as fast."""
    ratio, times = more.tokens_per_s / fewer.tokens_per_s, more.setup.gpus / fewer.setup.gpus
    if ratio <= times * (1 + _LEAST):
        return ""
    costs = [{name: us * each.setup.gpus for name, us in _parts(each).items()} for each in (more, fewer)]
    least, tokens = _LEAST * fewer.step_us * fewer.setup.gpus, fewer.job.tokens
    saves = [f"{us / tokens:.3g} µs on {_words(name)}" for us, name in _differences(*costs) if us > least][:_SHOWN]
    change = _changes(more.setup, fewer.setup)
    return (
        f"more than the {times:.3g} times that the GPUs are, as a token takes less of a GPU's time"
        f"{': ' + _and(saves) if saves else ''}, with {change}"
    )


def _parts(estimate: StepEstimate) -> Mapping[str, float]:
    """The parts of the whole step: those of the slowest stage alone would be compared with another stage's."""
    return estimate.mean_parts or estimate.parts


def _differences(one: Mapping[str, float], other: Mapping[str, float]) -> list[tuple[float, str]]:
    """By how much the parts of ``other`` are longer, the largest difference first."""
    found = ((other.get(name, 0.0) - one.get(name, 0.0), name) for name in {**one, **other})
    return sorted(found, key=lambda each: (-abs(each[0]), each[1]))


def _changes(one: Setup, other: Setup) -> str:
    """Say what ``one`` does in place of what."""
    words = [
        f"{axis.upper()}{getattr(one, axis)} instead of {axis.upper()}{getattr(other, axis)}"
        for axis in _DEGREES
        if getattr(one, axis) != getattr(other, axis)
    ]
    if one.micro_batch != other.micro_batch:
        words.append(f"micro-batches of {one.micro_batch} instead of {other.micro_batch}")
    if one.recompute != other.recompute:
        words.append(f"{one.recompute} instead of {other.recompute} recomputation")
    if one.offload != other.offload:
        words.append(f"{one.offload} instead of {other.offload} offloaded")
    words += [
        f"{getattr(one, name)} instead of {getattr(other, name)}"
        for name in ("precision", "exchange", "attention")
        if getattr(one, name) != getattr(other, name)
    ]
    if one.pipeline_layout != other.pipeline_layout:
        words.append(f"the layout {one.pipeline_layout} instead of {other.pipeline_layout}")
    if one.zero != other.zero:
        words.append(f"ZeRO {one.zero} instead of {other.zero}")
    if one.folded != other.folded:
        words.append("folding" if one.folded else "not folding")
    return _and(words) if words else "the same setup"


def _words(part: str) -> str:
    return _WORDS.get(part, part)


def _ms(us: float) -> str:
    """With three figures that count."""
    ms = us / 1e3
    return f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
