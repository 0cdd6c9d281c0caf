"""One layer as a program, forward and backward: what is computed
(:mod:`commlayer.scheduler.mapping.layer_work`), what is sent
(:mod:`commlayer.scheduler.mapping.step_collectives`), and what of that waits for what.

What is hidden, and behind what:

- ``tensor``: in the backward pass of the projections the sequence is gathered again beside the
  product for the input's gradient, whose sum is scattered beside the product for the weight's
  (Megatron-LM's asynchronous linear layer).
- ``context`` of the kind ``ring``: keys and values travel beside the attention's core; of the kind
  ``gather`` before it.
- tokens on their way to experts in chunks beside the experts' work, where the software does that
  (scheduler/overlap.py) and the experts are whole (etp 1).
- tokens in two levels (mapping/dispatch_levels.py) behind nothing: they are so where that is
  predicted to take less all the same.
- what ``megascale`` recomputation sends again is issued at the beginning of the layer's backward
  pass (MegaScale-MoE, figure 8b).
- what a layer has in the host's memory (mapping/host_copies.py), behind its neighbour: what the
  layer before sends there leaves while this one computes forward, and what the layer below needs
  comes back beside this one's backward pass.
- merged (:meth:`LayerBuilder.merged`): tokens of one micro-batch behind what another's computes,
  forward and backward, in the order of Megatron-Core's model_chunk_schedule_plan.py and of
  DeepSeek-V3's figure 4.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from commlayer.profiles.errors import InternalError, PlanError
from commlayer.scheduler import conflicts
from commlayer.scheduler.dispatch_price import row_maps_us
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.dispatch_levels import DispatchLevels
from commlayer.scheduler.mapping.host_copies import host_copy
from commlayer.scheduler.mapping.host_launches import LayerLaunches, host_calls, layer_launches, waits_for_counts
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_calls import AGAIN, LayerCalls
from commlayer.scheduler.mapping.layer_work import AnyCompute, LayerWork, TokenArrival, layer_work
from commlayer.scheduler.mapping.memory import offloaded_layer_bytes
from commlayer.scheduler.mapping.pricing import Pricer
from commlayer.scheduler.mapping.recomputation import ways_of
from commlayer.scheduler.mapping.software import Software
from commlayer.scheduler.mapping.step_collectives import StepCollective, layer_backward, layer_forward
from commlayer.scheduler.overlap import LATER_CHUNKS, choose_slices, posted
from commlayer.scheduler.programs import Breakdown, Compute, Issue, Item, PlannedCall, Wait, numbered, run_alone
from commlayer.scheduler.traffic import Traffic

__all__ = ["HostTimes", "LayerBuilder", "dispatch_note", "sequence"]

_LAUNCHES_WITHOUT_CHUNKS = (
    "launches counted without chunks: for each chunk of tokens the host launches calls and experts' products once more, "
    "for which no time is added"
)
"""A note. To count them is rejected for now: chunks are chosen without what they launch, and the published runs with
chunks beside computation, to which launches are fitted, are counted so too."""
_GATHERED = ("before_attention", "before_ffn")
Places = dict[str, list[PlannedCall]]
"""The calls of a pass, by their place in it
(:class:`~commlayer.scheduler.mapping.step_collectives.StepCollective`)."""


class HostTimes(NamedTuple):
    """The host's part of a layer, forward and backward: ``launches``, for which the layer waits for it; ``busy_us``, for
    which it is busy with the layer where it cannot run ahead, else 0."""

    launches: tuple[Compute, Compute]
    busy_us: tuple[float, float]


class LayerBuilder:
    """Makes programs of layers and times them.

    ``pricer``: of the collectives, by the run time's own plans; ``compute``: of everything else.
    """

    def __init__(self, job: Job, cluster: Cluster, software: Software, pricer: Pricer, compute: AnyCompute) -> None:
        self.job, self.cluster, self.software, self.pricer, self.compute = job, cluster, software, pricer, compute
        self.calls = LayerCalls(job, cluster, software, pricer)
        self._levels: dict[tuple[object, ...], tuple[DispatchLevels | None, str]] = {}
        self._hosts: dict[tuple[object, ...], HostTimes] = {}
        self.slices: dict[tuple[Traffic, float], tuple[int, ...]] = {}
        """The chunks in which rows go to experts that work on all of them for so many µs (of each product, backward)."""

    def sent(
        self, setup: Setup, exchanges: Iterable[StepCollective], levels: DispatchLevels | None
    ) -> Iterable[StepCollective]:
        """List the exchanges of ``setup`` as they go: those of tokens by the software's kernels
        where it has any, or in the two levels that are given."""
        if (routes := self.calls.routes(setup)) is not None:
            return routes.replaced(tuple(exchanges))
        return exchanges if levels is None else levels.replaced(exchanges)

    def levels(self, setup: Setup) -> tuple[DispatchLevels | None, str]:
        """The levels in which tokens go, and why; none where they go flat. Of one setup always the
        same."""
        nodes = self.cluster.nodes_of(setup.layout("ep"), setup.gpus)
        levels = DispatchLevels.of(self.job, setup, self.software, nodes)
        if levels is None:
            return None, ""
        # As many tokens of a rank take as long whichever degrees share them out, but for shared experts beside.
        tokens = (levels.tokens, setup.micro_batch / (setup.cp * setup.tp))
        beside = (setup.tp, setup.attention) if self.software.overlaps_shared else ()
        key = (*tokens, *beside, setup.ep, setup.precision, nodes)
        if key not in self._levels:
            flat_us, levels_us = _dispatch_us(self, setup, None), math.inf
            with contextlib.suppress(PlanError):  # a cluster without curves of rails, or of its nodes: then flat
                levels_us = _dispatch_us(self, setup, levels)
            why = (
                f"tokens go to their experts in two levels, on {levels.nodes:.2g} of {levels.num_nodes} nodes where flat sends "
                f"{self.job.model.top_k} rows: a layer's dispatch, experts and combine are predicted {levels_us:.0f} µs, "
                f"flat {flat_us:.0f}"
            )
            self._levels[key] = (levels, why) if levels_us < flat_us else (None, "")
        best, why = self._levels[key]
        return (levels if best else None), why

    def work(self, setup: Setup, is_moe: bool) -> LayerWork:
        """Find what one layer computes for a micro-batch."""
        routes = self.calls.routes(setup)
        arrival = None if routes is None else TokenArrival(routes.sent_rows, routes.kernels.permutes)
        return layer_work(self.job, setup, self.compute, is_moe, self.software, arrival)

    def host(self, setup: Setup, is_moe: bool) -> HostTimes:
        """The host's part of a layer, counted once for all setups that have the same."""
        by_calls = self.software.kernels is not None and self.calls.routes(setup) is None
        posts = self.calls.are_posted(setup)
        size, tp, cp, etp = setup.gpus // setup.pp, setup.tp, setup.cp, setup.etp
        if setup.zero <= 1:  # a call of more than one rank is launched as often, however many they are
            size, tp, etp = min(size, 2), min(tp, 2), min(etp, 2)
            cp = cp if self.software.context == "ring" else min(cp, 2)
        degrees = (tp, cp, setup.ep, etp, setup.exchange)
        ways = (setup.recompute, setup.precision, setup.attention, setup.zero)
        key = (is_moe, by_calls, posts, *degrees, *ways, size)
        if key not in self._hosts:
            software = replace(self.software, kernels=None) if by_calls else self.software
            waits = is_moe and waits_for_counts(self.job, setup, software, posts=posts)
            forward, backward = (
                Compute(self.compute.launched_us(launches, waits=waits), "host")
                for launches in layer_launches(self.job, setup, software, is_moe=is_moe, posts=posts)
            )
            calls = host_calls(self.job, setup, software, is_moe=is_moe) if waits else LayerLaunches(0, 0)
            busy = [self.compute.busy_us(number) for number in calls]
            if waits and software.kernels is not None:
                busy[0] += software.kernels.prepare_us  # it waits until it knows how many rows come
            self._hosts[key] = HostTimes((forward, backward), (busy[0], busy[1]))
        return self._hosts[key]

    def forward(self, setup: Setup, is_moe: bool = True) -> list[Item]:
        """One layer's forward pass of a micro-batch."""
        passes = _Passes(self, setup, is_moe, self.levels(setup)[0])
        at, _ = passes.places(layer_forward(self.job, setup, self.software, moe=is_moe))
        program = sequence(self.host(setup, is_moe).launches[0], passes.forward(at))
        return _beside_copies(self, "offload", setup, is_moe, program)

    def backward(self, setup: Setup, is_moe: bool = True) -> list[Item]:
        """One layer's backward pass of a micro-batch, with what is computed and sent again for
        it."""
        passes = _Passes(self, setup, is_moe, self.levels(setup)[0])
        at, resent = passes.places(layer_backward(self.job, setup, self.software, moe=is_moe))
        if setup.recompute == "full":
            # What the forward pass sends comes first; a sequence that is gathered once more for a weight's gradient after it.
            gathered = {place: resent[place][1:] for place in _GATHERED if len(resent.get(place, ())) > 1}
            again = passes.forward(resent | {place: resent[place][:1] for place in gathered})
            remade = [replace(item, name="recompute") if isinstance(item, Compute) else item for item in again]
            resent = gathered
        else:
            remade, resent = _remade(setup, passes.work, resent)
        experts = passes.experts(at, is_forward=False)
        before, after, _ = passes.backward_around(at, resent, shared_is_beside=passes.has_shared_beside(at))
        program = sequence(self.host(setup, is_moe).launches[1], remade, before, experts, after)
        return _beside_copies(self, "reload", setup, is_moe, program)

    def merged(self, setup: Setup, is_moe: bool = True) -> list[Item]:
        """One layer's forward pass of a micro-batch and its backward pass of another, merged: one
        computes while the other's tokens travel.

        Exchanges go one after another: gradients to the experts, tokens to them, gradients from
        them, tokens from them. Products for weights are computed when the gradients of tokens are
        on their way (``--delay-wgrad-compute``; DualPipe's split).
        """
        passes = _Passes(self, setup, is_moe, self.levels(setup)[0])
        there, _ = passes.places(layer_forward(self.job, setup, self.software, moe=is_moe))
        back, resent = passes.places(layer_backward(self.job, setup, self.software, moe=is_moe))
        remade, resent = _remade(setup, passes.work, resent)
        forth = passes.expert_parts(there, is_forward=True)
        home = passes.expert_parts(back, is_forward=False, puts_off=True)
        before, after = passes.forward_around(there)
        before_back, after_back, later = passes.backward_around(back, resent, puts_off=True)
        (tokens_begun, tokens_ended), (tokens_sent, tokens_back) = _halves_out(forth.out), _halves_home(forth.home)
        (begun, ended), (sent, come) = _halves_out(home.out), _halves_home(home.home)
        program = sequence(
            self.host(setup, is_moe).launches,
            *(remade, before_back, home.first, begun, later),
            *(before, forth.first, tokens_begun),
            *(ended, home.computed, sent, home.later),
            *(tokens_ended, forth.computed, tokens_sent),
            *(come, home.last, after_back),
            *(tokens_back, forth.last, after),
        )
        return _beside_copies(self, "offload and reload", setup, is_moe, program)

    def timed(self, program: Sequence[Item]) -> Breakdown:
        """The times of ``program``, with calls of different axes in each other's way."""
        for this, following in zip(program, [*program[1:], None], strict=True):
            if isinstance(this, Issue) and not (isinstance(following, Wait) and following.call is this.call):
                return self.simulated(program)[0]
        return run_alone(program)  # nothing is under way while something else is

    def simulated(self, program: Sequence[Item]) -> tuple[Breakdown, conflicts.Forecast]:
        """The same by :func:`commlayer.scheduler.conflicts.simulate`, always. What computation took, it took as it was
        stretched."""
        policy = self.pricer.policy.lanes if self.software.lanes else None
        # For how much resources slow each other down; every call brings the curves of its group.
        profiles = (item.call.profile for item in program if isinstance(item, Issue))
        profile = next(filter(None, profiles), None) or self.cluster.profile_of((1,))
        forecast = conflicts.simulate(list(numbered(program)), profile, policy)
        times = Breakdown(total_us=forecast.total_us)
        for name, start, end in forecast.computed:
            times.parts[name] = times.parts.get(name, 0.0) + end - start
        calls = [item.call for item in program if isinstance(item, Wait)]
        for call, (_, start, end) in zip(calls, forecast.waited, strict=True):
            times.wait(call, end - start)
        return times, forecast


def dispatch_note(builder: LayerBuilder, setup: Setup) -> str:
    """Why tokens go to their experts in two levels, how kernels send them, or that the launches of
    their chunks are not counted; empty where they go flat, as they should."""
    kernels = builder.software.kernels
    if kernels is None:
        is_chunked = _may_chunk(builder.software, setup) and setup.ep > 1
        is_counted_once = is_chunked and bool(builder.host(setup, True).launches[0].us)
        return builder.levels(setup)[1] or _LAUNCHES_WITHOUT_CHUNKS * is_counted_once
    if (routes := builder.calls.routes(setup)) is not None:
        return routes.note()
    if setup.ep == 1:
        return ""
    return (
        f"{kernels.name} does not dispatch this mapping, whose tokens go by {setup.exchange}: it stands in for "
        "an all_to_all with whole experts (etp 1), every choice (no capacity) and as many ranks of the group on every node"
    )


def _dispatch_us(builder: LayerBuilder, setup: Setup, levels: DispatchLevels | None) -> float:
    """A layer's tokens to their experts, these, and back, forward and backward."""
    total, plain = 0.0, replace(setup, recompute="none")
    passes = _Passes(builder, plain, True, levels)
    for exchanges, is_forward in ((layer_forward, True), (layer_backward, False)):
        of_tokens = [
            each
            for each in exchanges(builder.job, plain, builder.software)
            if each.place in ("dispatch", "combine") and not each.name.endswith(AGAIN)
        ]
        total += builder.timed(passes.experts(passes.places(of_tokens)[0], is_forward=is_forward)).total_us
    return total


def _beside_copies(builder: LayerBuilder, name: str, setup: Setup, is_moe: bool, program: list[Item]) -> list[Item]:
    """With the copies to the host, or from it, that are under way meanwhile: as many bytes as the
    layer itself has there."""
    gpu = builder.cluster.gpu
    nbytes = offloaded_layer_bytes(builder.job, setup, gpu, software=builder.software, is_moe=is_moe)
    if not nbytes:
        return program
    copy = host_copy(name, nbytes, gpu)
    return [Issue(copy), *program, Wait(copy)]


class _ExpertParts(NamedTuple):
    """The experts' part of a pass, in order: the calls to them, their work, what of it is put off
    until the calls back are under way, these, and what is copied before and after."""

    first: list[Compute]
    out: list[PlannedCall]
    computed: list[Compute]
    later: Compute
    home: list[PlannedCall]
    last: list[Compute]


class _Passes:
    """The passes of one layer for a micro-batch. ``levels``: those in which its tokens go; None: they go flat, or by
    kernels. ``at``: a pass's calls, by their place in it."""

    def __init__(self, builder: LayerBuilder, setup: Setup, is_moe: bool, levels: DispatchLevels | None) -> None:
        self.builder, self.setup, self.levels, self.software = builder, setup, levels, builder.software
        self.work = builder.work(setup, is_moe)

    def places(self, exchanges: Iterable[StepCollective]) -> tuple[Places, Places]:
        """A pass's calls, and those that are sent again. Raises InternalError for one at a place that no
        layer's program has: it would drop out of the step's price."""
        at: Places = {}
        resent: Places = {}
        names = {*self.work.order.kinds, "parameters", "gradients"}
        for each in self.builder.sent(self.setup, exchanges, self.levels):
            if each.place not in names:
                raise InternalError(f"calls at {each.place} have no place in a layer's program")
            places = resent if each.name.endswith(AGAIN) else at
            places.setdefault(each.place, []).append(self.builder.calls.call(self.setup, each))
        return at, resent

    def forward(self, at: Places) -> list[Item]:
        """The forward pass."""
        experts = self.experts(at, is_forward=True)
        before, after = self.forward_around(at, shared_is_beside=self.has_shared_beside(at))
        return sequence(before, experts, after)

    def forward_around(self, at: Places, *, shared_is_beside: bool = False) -> tuple[list[Item], list[Item]]:
        """Return what comes before the tokens' way to the experts, and after their way back."""
        first, last = _fetched(at.get("parameters", []), self.software)
        before: list[Item] = []
        after: list[Item] = []
        for segment in self.work.order.around:
            if segment == "shared" and shared_is_beside:
                continue
            items = after if segment == "after_ffn" else before
            us = self.work[segment].forward
            if segment == "core":
                items += _core(at.get("context", []), us, self.software)
            elif segment != "context":
                items += [_computed(self.work, segment, us), *_sync(at.get(segment, []))]
        return sequence(first, before), sequence(after, last)

    def backward_around(
        self, at: Places, again: Places, *, puts_off: bool = False, shared_is_beside: bool = False
    ) -> tuple[list[Item], list[Item], list[Item]]:
        """Return what comes before the gradients' way to the experts, and after it, and what of
        that is put off.

        ``again``: what is sent again. ``puts_off``: attention's products for weights, but those
        beside which a sum is scattered.
        """
        work = self.work
        first, last = _fetched(again.get("parameters", []), self.software)
        first_sum, last_sum = _fetched(at.get("gradients", []), self.software)
        if first_sum and not self.software.overlaps_gradients:
            first_sum, last_sum = [], _sync(at["gradients"])
        later = 0.0
        before_experts = sequence(first, first_sum)
        after_experts: list[Item] = []
        gathers = work.order.gathers
        beside = set(gathers.values())
        for segment in reversed(work.order.around):
            if segment in beside:
                continue
            times, gather = work[segment], gathers.get(segment)
            gathered, scattered = (each.get(gather, []) if gather else [] for each in (again, at))
            if segment == "after_ffn":
                before_experts += _sync(at.get(segment, []))
            elif segment == "shared" and shared_is_beside:
                after_experts += [*_sync(gathered), *_sync(scattered)]
            elif segment == "shared":  # gathered beside one half of the products, and sums scattered beside the other
                half = _computed(work, segment, times.backward / 2)
                before_experts += [*_beside_product(gathered, half), *_beside_product(scattered, half)]
            elif segment == "core":
                after_experts += _core(scattered, times.backward, self.software)
            elif segment in ("projections", "out"):
                put_off = times.weight_gradient if puts_off and not scattered else 0.0
                later += put_off
                weights = times.weight_gradient - put_off
                if segment == "out":
                    after_experts.append(_computed(work, segment, times.input_gradient + weights))
                else:
                    after_experts += _beside_product(gathered, _computed(work, segment, times.input_gradient))
                    after_experts += _beside_product(scattered, _computed(work, segment, weights))
            else:
                after_experts += [_computed(work, segment, times.backward), *_sync(at.get(segment, []))]
        return sequence(before_experts), sequence(after_experts, last, last_sum), sequence(Compute(later, "attention"))

    def has_shared_beside(self, at: Places) -> bool:
        """Whether shared experts compute beside the exchange of tokens; not where there is none, or
        in a dense layer."""
        is_asked = self.software.overlaps_shared and not self.software.hides_dispatch
        return is_asked and bool(self.work["experts"].forward and at.get("dispatch") and at.get("combine"))

    def experts(self, at: Places, *, is_forward: bool) -> list[Item]:
        """Dispatch, experts and combine; backward the other way round."""
        parts = self.expert_parts(at, is_forward=is_forward, puts_off=self.software.puts_off_weights)
        is_alone = len(parts.out) == 1 and len(parts.home) == 1  # others would need a plan of their own
        if self.levels is None and is_alone and _may_chunk(self.software, self.setup):
            return [*parts.first, *self.chunked(parts, is_forward), *parts.last]
        out, beside_home = _sync(parts.out), [parts.later]
        if self.has_shared_beside(at):
            # Shared experts' first products, of two (three with a gate), beside the way to the routed experts and the last one
            # beside the way home; backward the last one first.
            shared_us = self.work["shared"].forward if is_forward else self.work["shared"].backward
            last_us = shared_us / self.builder.job.model.matrices
            products = Compute(shared_us - last_us, "dense"), Compute(last_us, "dense")
            beside_out, beside_back = products if is_forward else products[::-1]
            begun, ended = _halves_out(parts.out)
            out, beside_home = [*begun, beside_out, *ended], [beside_back, parts.later]
        return [*parts.first, *out, *parts.computed, *_home_beside(parts.home, beside_home), *parts.last]

    def expert_parts(self, at: Places, *, is_forward: bool, puts_off: bool = False) -> _ExpertParts:
        """The experts' part of a pass. ``puts_off``: backward, their products for weights."""
        work = self.work
        out = [*at.get("dispatch", []), *at.get("gather_experts", [])]
        home = [*at.get("scatter_experts", []), *at.get("combine", [])]
        put_off = 0.0
        if is_forward:
            moved_us = work["expert_memory"].forward + work["expert_biases"].forward
            computed = [Compute(work["experts"].forward, "experts"), _moved(moved_us)]
            first, last = _moved(work["permute"].forward), _moved(work["unpermute"].forward)
        else:
            put_off = work["experts"].weight_gradient if puts_off else 0.0
            moved_us = work["expert_memory"].backward + work["expert_biases"].backward
            computed = [Compute(work["experts"].backward - put_off, "experts"), _moved(moved_us)]
            first, last = _moved(work["unpermute"].backward), _moved(work["permute"].backward)
            out, home = home[::-1], out[::-1]
        beyond = []
        if self.levels is not None and out and home:
            # what two levels move in memory beyond a flat dispatch, and the maps of all ranks' tokens, which the dispatcher takes
            # for a part of the exchanges' time
            moved = self.builder.compute.memory_us(self.levels.moved_elements * self.software.activation_bytes)
            beyond = [_moved(moved + row_maps_us(sum(call.us for call in [*out, *home])))]
        return _ExpertParts([first], out, computed, Compute(put_off, "experts"), home, [*beyond, last])

    def chunked(self, parts: _ExpertParts, is_forward: bool) -> list[Item]:
        """The experts' work in chunks, beside their way to the experts and back, where that is
        worth it."""
        pricer, computed, later = self.builder.pricer, parts.computed, parts.later
        traffic = parts.out[0].plan.traffic
        work_us = sum(work.us for work in (*computed, later)) / (1 if is_forward else 2)
        key = (traffic, work_us)
        if key not in self.builder.slices:
            self.builder.slices[key], _ = choose_slices(
                traffic,
                lambda part: pricer.us(traffic.collective, round(part), traffic.nodes, traffic.lane),
                lambda part: work_us * part / traffic.logical_bytes,
                puts_off=self.software.puts_off_weights,
            )
        slices = self.builder.slices[key]
        if len(slices) == 1:
            return [*_sync(parts.out), *computed, *_home_beside(parts.home, [later])]
        shares = [part / sum(slices) for part in (slices if is_forward else slices[::-1])]
        outs: list[PlannedCall] = []
        homes: list[PlannedCall] = []
        for call, chunks in ((parts.out[0], outs), (parts.home[0], homes)):
            sent = call.plan.traffic
            for share in shares:
                size = round(sent.logical_bytes * share)
                decision = pricer.decide(sent.collective, size, sent.nodes, sent.lane)
                chunks.append(replace(call, plan=decision.plan, us=decision.predicted_us))
        items: list[Item] = []
        for kind, chunk in posted(len(shares), len(shares)):
            if kind == "dispatch":
                items.append(Issue(outs[chunk]))
            elif kind == "experts":
                works = [*computed, later] if chunk < len(shares) - LATER_CHUNKS else computed
                items.append(Wait(outs[chunk]))
                items += [replace(work, us=work.us * shares[chunk]) for work in works if work.us]
            else:
                items.append(Issue(homes[chunk]))
        rest = Compute(later.us * sum(shares[-LATER_CHUNKS:]), later.name)
        return [*items, *([rest] if rest.us else []), *map(Wait, homes)]


def _may_chunk(software: Software, setup: Setup) -> bool:
    """Whether tokens may go in chunks: of whole experts, and one exchange each way."""
    return software.hides_dispatch and setup.exchange == "all_to_all" and setup.etp == 1


def _fetched(calls: list[PlannedCall], software: Software) -> tuple[list[Item], list[Item]]:
    """Weights of the next layer while this one computes, as prefetching software does; else now,
    and nothing beside."""
    if software.overlaps_parameters:
        return [Issue(call) for call in calls], [Wait(call) for call in calls]
    return _sync(calls), []


def _core(context: list[PlannedCall], us: float, software: Software) -> list[Item]:
    core = Compute(us, "attention")
    return _beside_product(context, core) if software.context == "ring" else [*_sync(context), core]


def sequence(*items: Item | Iterable[Item]) -> list[Item]:
    """One flat list; work of no length and calls of no time are left out."""
    flat = (one for item in items for one in ((item,) if isinstance(item, Item) else item))
    return [one for one in flat if (one.us if isinstance(one, Compute) else one.call.us)]


def _sync(calls: Iterable[PlannedCall]) -> list[Item]:
    return [item for call in calls for item in (Issue(call), Wait(call))]


def _of_one_group(calls: Sequence[PlannedCall]) -> int:
    """How many of the first calls are of one group, which runs them one after another; those of
    another wait for them."""
    return next((index for index, call in enumerate(calls) if call.group != calls[0].group), len(calls))


def _halves_out(calls: Sequence[PlannedCall]) -> tuple[list[Item], list[Item]]:
    """The calls to the experts that begin at once; and their end, and then the others."""
    number = _of_one_group(calls)
    return list(map(Issue, calls[:number])), [*map(Wait, calls[:number]), *_sync(calls[number:])]


def _halves_home(calls: Sequence[PlannedCall]) -> tuple[list[Item], list[Item]]:
    """The calls from the experts, of which the last ones begin when those of other groups before
    them have ended; and the end of these last ones."""
    number = len(calls) - _of_one_group(calls[::-1])
    return [*_sync(calls[:number]), *map(Issue, calls[number:])], list(map(Wait, calls[number:]))


def _home_beside(home: list[PlannedCall], later: Sequence[Item]) -> list[Item]:
    """The way home, one call after another, and what is computed while the last of them is under
    way."""
    return [*_sync(home[:-1]), *map(Issue, home[-1:]), *sequence(later), *map(Wait, home[-1:])]


def _beside_product(calls: list[PlannedCall], work: Compute) -> list[Item]:
    return [*map(Issue, calls), work, *map(Wait, calls)]


def _moved(us: float) -> Compute:
    """Work that the memory's rate bounds."""
    return Compute(us, "memory", is_streaming=True)


def _computed(work: LayerWork, segment: str, us: float) -> Compute:
    """The computation in a segment."""
    kind = work.order.kinds[segment]
    return Compute(us, kind, is_streaming=kind == "memory")


def _remade(setup: Setup, work: LayerWork, resent: Places) -> tuple[list[Item], Places]:
    """Return what recomputation but ``full`` computes and sends again, and what else is sent again.

    ``megascale`` sends all of it beside its work, and waits at once for what that does not hide. Of
    modules calls are waited for one by one, as in their forward pass.
    """
    ways = ways_of(setup.recompute)
    if not ways:
        return [], resent
    if "megascale" in ways:
        calls = [call for place in resent if place != "parameters" for call in resent[place]]
        remade = Compute(work.remade("megascale"), "recompute", is_streaming=True)
        return _beside_product(calls, remade), {"parameters": resent.get("parameters", [])}
    sent: list[PlannedCall] = []
    left: Places = {}
    for place, calls in resent.items():
        number = len(calls) if work.order.is_remade(place, ways) else 0
        if place in _GATHERED:  # a sequence that is gathered once more for a weight's gradient comes after
            number = min(number, 1)
        sent += calls[:number]
        left[place] = calls[number:]
    return [Compute(work.remade(setup.recompute), "recompute"), *_sync(sent)], left
