"""Notes on what nobody chose: an estimate by the dispatchers, and by the software, that are as likely as the one it is of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from commlayer.cli.mapping_options import Request
from commlayer.profiles.errors import PlanError, UsageError
from commlayer.scheduler.mapping.dispatch_kernels import DISPATCH_KERNELS
from commlayer.scheduler.mapping.result import StepEstimate
from commlayer.scheduler.mapping.software import COMMLAYER, Software, own_dispatcher, with_dispatcher
from commlayer.scheduler.mapping.token_routes import TokenRoutes

__all__ = ["software_words", "with_choices"]


def with_choices(estimates: Iterable[StepEstimate], request: Request) -> tuple[StepEstimate, ...]:
    """The estimates, fastest first, with notes: on the first one software that nobody named, and on the
    first with experts on several NVLink domains a dispatcher that nobody named."""
    every = list(estimates)
    if request.is_default_software:
        note = software_words(request)
        try:
            own = _by(every[0], request, request.changed(COMMLAYER))
        except (UsageError, PlanError) as error:
            note += f"; commlayer's own cannot run this mapping: {error}"
        else:
            fits = "" if own.fits else ", in more memory than there is"
            note += (
                f"; by commlayer's own this mapping takes {own.step_us / 1e3:,.1f} ms{fits}, which nobody's published run "
                "checks: --software commlayer"
            )
        every[0] = replace(every[0], notes=(*every[0].notes, note))
    across = (place for place, each in enumerate(every) if _num_domains(each, request) > 1)
    place = next(across, None)
    if request.dispatcher is None and place is not None:
        every[place] = replace(every[place], notes=(*every[place].notes, *_dispatcher_note(every[place], request)))
    return tuple(every)


def _num_domains(estimate: StepEstimate, request: Request) -> int:
    return len(request.cluster.nodes_of(estimate.setup.layout("etp_ep"), estimate.setup.gpus))


def software_words(request: Request) -> str:
    """Say by which software an estimate is where nobody named one."""
    return f"--software was not given: this is the step as {request.software.name.split(',')[0]} runs it"


def _dispatcher_note(estimate: StepEstimate, request: Request) -> Iterator[str]:
    """Say how fast the mapping is by each dispatcher that can send its tokens, where there are others."""
    setup = replace(estimate.setup, exchange="all_to_all")
    nodes = request.cluster.nodes_of(setup.layout("ep"), setup.gpus)
    ways = {own_dispatcher(request.software.name): request.software}
    for name, kernels in DISPATCH_KERNELS.items():
        software = with_dispatcher(request.software, name)
        if TokenRoutes.of(kernels, estimate.job, setup, nodes, software) is not None:
            ways[name] = software
    speeds = []
    for name, software in ways.items():
        try:
            other = _by(replace(estimate, setup=setup), request, software)
        except (UsageError, PlanError):  # a measured cluster, on which nobody measured these kernels
            continue
        speeds.append(f"{name} {other.tflops:,.0f}{'' if other.fits else ' (does not fit)'}")
    if len(speeds) > 1:
        yield (
            f"experts lie on {_num_domains(estimate, request)} NVLink domains, and --dispatcher was not given: "
            f"{', '.join(speeds)} TFLOP/s a GPU with this mapping and --exchange all_to_all: say which you run"
        )


def _by(estimate: StepEstimate, request: Request, software: Software) -> StepEstimate:
    return request.make(estimate.job, request.cluster, software).estimate(estimate.setup, detail=False)
