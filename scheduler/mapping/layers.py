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

__all__ = ["LayerBuilder", "sequence"]

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


class _ExpertParts(NamedTuple):
    """The experts' part of a pass, in order: the calls to them, their work, what of it is put off
    until the calls back are under way, these, and what is copied before and after."""

    first: list[Compute]
    out: list[PlannedCall]
    computed: list[Compute]
    later: Compute
    home: list[PlannedCall]
    last: list[Compute]


class LayerBuilder:
    """Makes programs of layers and times them.

    ``pricer``: of the collectives, by the run time's own plans; ``compute``: of everything else.
    """

    def __init__(self, job: Job, cluster: Cluster, software: Software, pricer: Pricer, compute: AnyCompute) -> None:
        self.job, self.cluster, self.software, self.pricer, self.compute = job, cluster, software, pricer, compute
        self.calls = LayerCalls(job, cluster, software, pricer)
        self._levels: dict[tuple[object, ...], tuple[DispatchLevels | None, str]] = {}
        self._known_launches: dict[tuple[object, ...], tuple[tuple[Compute, Compute], tuple[float, float]]] = {}
        self._known_slices: dict[tuple[Traffic, float], tuple[int, ...]] = {}

    def sent(self, setup: Setup, exchanges: Iterable[StepCollective]) -> Iterable[StepCollective]:
        """List the exchanges of ``setup`` as they go: those of tokens by the software's kernels
        where it has any, or in two levels where that takes less time."""
        if (routes := self.calls.routes(setup)) is not None:
            return routes.replaced(tuple(exchanges))
        levels = self._chosen(setup)[0]
        return exchanges if levels is None else levels.replaced(exchanges)

    def dispatch_note(self, setup: Setup) -> str:
        """Why tokens go to their experts in two levels, how kernels send them, or that the launches
        of their chunks are not counted; empty where they go flat, as they should."""
        if self.software.kernels is None:
            is_counted_once = self._may_chunk(setup) and setup.ep > 1 and bool(self.launches(setup, True)[0].us)
            return self._chosen(setup)[1] or _LAUNCHES_WITHOUT_CHUNKS * is_counted_once
        if (routes := self.calls.routes(setup)) is not None:
            return routes.note()
        if setup.ep == 1:
            return ""
        return (
            f"{self.software.kernels.name} does not dispatch this mapping, whose tokens go by {setup.exchange}: it stands in for "
            "an all_to_all with whole experts (etp 1), every choice (no capacity) and as many ranks of the group on every node"
        )

    def _chosen(self, setup: Setup) -> tuple[DispatchLevels | None, str]:
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
            flat_us, levels_us = self._dispatch_us(setup, None), math.inf
            with contextlib.suppress(PlanError):  # a cluster without curves of rails, or of its nodes: then flat
                levels_us = self._dispatch_us(setup, levels)
            why = (
                f"tokens go to their experts in two levels, on {levels.nodes:.2g} of {levels.num_nodes} nodes where flat sends "
                f"{self.job.model.top_k} rows: a layer's dispatch, experts and combine are predicted {levels_us:.0f} µs, "
                f"flat {flat_us:.0f}"
            )
            self._levels[key] = (levels, why) if levels_us < flat_us else (None, "")
        found, why = self._levels[key]
        return (levels if found else None), why

    def _dispatch_us(self, setup: Setup, levels: DispatchLevels | None) -> float:
        """A layer's tokens to their experts, these, and back, forward and backward."""
        work, total = self.work(setup, True), 0.0
        plain = replace(setup, recompute="none")
        for list_exchanges, is_forward in ((layer_forward, True), (layer_backward, False)):
            exchanges = [
                each
                for each in list_exchanges(self.job, plain, self.software)
                if each.place in ("dispatch", "combine") and not each.name.endswith(AGAIN)
            ]
            at = self._calls(plain, exchanges if levels is None else levels.replaced(exchanges))
            total += self.timed(self._experts(plain, work, at, levels, is_forward=is_forward)).total_us
        return total

    def work(self, setup: Setup, is_moe: bool) -> LayerWork:
        """Find what one layer computes for a micro-batch."""
        routes = self.calls.routes(setup)
        arrival = None if routes is None else TokenArrival(routes.sent_rows, routes.kernels.permutes)
        return layer_work(self.job, setup, self.compute, is_moe, self.software, arrival)

    def forward(self, setup: Setup, is_moe: bool = True) -> list[Item]:
        """One layer's forward pass of a micro-batch."""
        work = self.work(setup, is_moe)
        at = self._places(setup, layer_forward(self.job, setup, self.software, moe=is_moe))
        program = sequence(self.launches(setup, is_moe)[0], self._forward(setup, work, at))
        return self._beside_copies("offload", setup, is_moe, program)

    def backward(self, setup: Setup, is_moe: bool = True) -> list[Item]:
        """One layer's backward pass of a micro-batch, with what is computed and sent again for
        it."""
        work, launches = self.work(setup, is_moe), self.launches(setup, is_moe)[1]
        exchanges = layer_backward(self.job, setup, self.software, moe=is_moe)
        at, resent = self._told_apart(setup, exchanges)
        if setup.recompute == "full":
            # What the forward pass sends comes first; a sequence that is gathered once more for a weight's gradient after it.
            gathered = {place: resent[place][1:] for place in _GATHERED if len(resent.get(place, ())) > 1}
            resent |= {place: resent[place][:1] for place in gathered}
            again = _renamed(self._forward(setup, work, resent))
            return sequence(launches, again, self._backward(setup, work, at, gathered))
        remade, resent = _remade(setup, work, resent)
        program = sequence(launches, remade, self._backward(setup, work, at, resent))
        return self._beside_copies("reload", setup, is_moe, program)

    def launches(self, setup: Setup, is_moe: bool) -> tuple[Compute, Compute]:
        """The time for which a layer waits for its host, forward and backward."""
        return self._launched(setup, is_moe)[0]

    def least_us(self, setup: Setup, is_moe: bool) -> tuple[float, float]:
        """The time for which the host is busy with a layer, forward and backward, where it cannot
        run ahead; else 0."""
        return self._launched(setup, is_moe)[1]

    def _launched(self, setup: Setup, is_moe: bool) -> tuple[tuple[Compute, Compute], tuple[float, float]]:
        """The answers of :meth:`launches` and :meth:`least_us`, counted once for all setups that have the
        same."""
        by_calls = self.software.kernels is not None and self.calls.routes(setup) is None
        posts = self.calls.are_posted(setup)
        size, tp, cp, etp = setup.gpus // setup.pp, setup.tp, setup.cp, setup.etp
        if setup.zero <= 1:  # a call of more than one rank is launched as often, however many they are
            size, tp, etp = min(size, 2), min(tp, 2), min(etp, 2)
            cp = cp if self.software.context == "ring" else min(cp, 2)
        degrees = (tp, cp, setup.ep, etp, setup.exchange)
        ways = (setup.recompute, setup.precision, setup.attention, setup.zero)
        key = (is_moe, by_calls, posts, *degrees, *ways, size)
        if key not in self._known_launches:
            software = replace(self.software, kernels=None) if by_calls else self.software
            waits = is_moe and waits_for_counts(self.job, setup, software, posts=posts)
            forward, backward = (
                Compute(self.compute.launched_us(launches, waits=waits), "host")
                for launches in layer_launches(self.job, setup, software, is_moe=is_moe, posts=posts)
            )
            calls = host_calls(self.job, setup, software, is_moe=is_moe) if waits else LayerLaunches(0, 0)
            least = [self.compute.busy_us(number) for number in calls]
            if waits and software.kernels is not None:
                least[0] += software.kernels.prepare_us  # it waits until it knows how many rows come
            self._known_launches[key] = (forward, backward), (least[0], least[1])
        return self._known_launches[key]

    def _beside_copies(self, name: str, setup: Setup, is_moe: bool, program: list[Item]) -> list[Item]:
        """With the copies to the host, or from it, that are under way meanwhile: as many bytes as
        the layer itself has there."""
        nbytes = offloaded_layer_bytes(self.job, setup, self.cluster.gpu, software=self.software, is_moe=is_moe)
        if not nbytes:
            return program
        copy = host_copy(name, nbytes, self.cluster.gpu)
        return [Issue(copy), *program, Wait(copy)]

    def merged(self, setup: Setup, is_moe: bool = True) -> list[Item]:
        """One layer's forward pass of a micro-batch and its backward pass of another, merged: one
        computes while the other's tokens travel.

        Exchanges go one after another: gradients to the experts, tokens to them, gradients from
        them, tokens from them. Products for weights are computed when the gradients of tokens are
        on their way (``--delay-wgrad-compute``; DualPipe's split).
        """
        work = self.work(setup, is_moe)
        there = self._places(setup, layer_forward(self.job, setup, self.software, moe=is_moe))
        back, resent = self._told_apart(setup, layer_backward(self.job, setup, self.software, moe=is_moe))
        remade, resent = _remade(setup, work, resent)
        levels = self._chosen(setup)[0]
        forth = self._expert_parts(work, there, levels, is_forward=True)
        home = self._expert_parts(work, back, levels, is_forward=False, puts_off=True)
        before, after = self._forward_around(setup, work, there)
        before_back, after_back, later = self._backward_around(setup, work, back, resent, puts_off=True)
        program = sequence(
            self.launches(setup, is_moe),
            remade,
            before_back,
            home.first,
            _begun(home.out),
            later,
            before,
            forth.first,
            _begun(forth.out),
            _ended(home.out),
            home.computed,
            _sent_home(home.home),
            home.later,
            _ended(forth.out),
            forth.computed,
            _sent_home(forth.home),
            _come_home(home.home),
            home.last,
            after_back,
            _come_home(forth.home),
            forth.last,
            after,
        )
        return self._beside_copies("offload and reload", setup, is_moe, program)

    def timed(self, program: Sequence[Item]) -> Breakdown:
        """The times of ``program``, with calls of different axes in each other's way."""
        return run_alone(program) if _is_serial(program) else self.simulated(program)[0]

    def simulated(self, program: Sequence[Item]) -> tuple[Breakdown, conflicts.Forecast]:
        """The same by :func:`commlayer.scheduler.conflicts.simulate`, always."""
        policy = self.pricer.policy.lanes if self.software.lanes else None
        # For how much resources slow each other down; every call brings the curves of its group.
        profiles = (item.call.profile for item in program if isinstance(item, Issue))
        profile = next(filter(None, profiles), None) or self.cluster.profile_of((1,))
        forecast = conflicts.simulate(list(numbered(program)), profile, policy)
        return _broken_down(forecast, program), forecast

    def _told_apart(self, setup: Setup, exchanges: Iterable[StepCollective]) -> tuple[Places, Places]:
        """A backward pass's calls, and those that are sent again."""
        found: tuple[list[StepCollective], list[StepCollective]] = [], []
        for each in exchanges:
            found[each.name.endswith(AGAIN)].append(each)
        return self._places(setup, found[0]), self._places(setup, found[1])

    def _places(self, setup: Setup, exchanges: Iterable[StepCollective]) -> Places:
        return self._calls(setup, self.sent(setup, exchanges))

    def _calls(self, setup: Setup, exchanges: Iterable[StepCollective]) -> Places:
        found: Places = {}
        for each in exchanges:
            found.setdefault(each.place, []).append(self.calls.call(setup, each))
        return found

    def _forward(self, setup: Setup, work: LayerWork, at: Places) -> list[Item]:
        is_beside = self._has_shared_beside(work, at)
        experts = self._experts(setup, work, at, self._chosen(setup)[0], is_forward=True)
        before, after = self._forward_around(setup, work, at, shared_is_beside=is_beside)
        return sequence(before, experts, after)

    def _forward_around(
        self, setup: Setup, work: LayerWork, at: Places, *, shared_is_beside: bool = False
    ) -> tuple[list[Item], list[Item]]:
        """Return what comes before the tokens' way to the experts, and after their way back."""
        _check_places(work, at)
        first, last = self._beside(at.get("parameters", []))
        before: list[Item] = []
        after: list[Item] = []
        for segment in work.order.around:
            if segment == "shared" and shared_is_beside:
                continue
            items = after if segment == "after_ffn" else before
            if segment == "core":
                items += self._core(at.get("context", []), work[segment].forward)
            elif segment != "context":
                items += [_computed(work, segment, work[segment].forward), *_sync(at.get(segment, []))]
        return sequence(first, before), sequence(after, last)

    def _backward(self, setup: Setup, work: LayerWork, at: Places, again: Places) -> list[Item]:
        is_beside = self._has_shared_beside(work, at)
        experts = self._experts(setup, work, at, self._chosen(setup)[0], is_forward=False)
        before, after, _ = self._backward_around(setup, work, at, again, shared_is_beside=is_beside)
        return sequence(before, experts, after)

    def _backward_around(
        self,
        setup: Setup,
        work: LayerWork,
        at: Places,
        again: Places,
        *,
        puts_off: bool = False,
        shared_is_beside: bool = False,
    ) -> tuple[list[Item], list[Item], list[Item]]:
        """Return what comes before the gradients' way to the experts, and after it, and what of
        that is put off.

        ``puts_off``: attention's products for weights, but those beside which a sum is scattered.
        """
        _check_places(work, at)
        _check_places(work, again)
        first, last = self._beside(again.get("parameters", []))
        first_sum, last_sum = self._beside(at.get("gradients", []))
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
            elif segment == "shared":
                if shared_is_beside:
                    after_experts += [*_sync(gathered), *_sync(scattered)]
                else:
                    before_experts += _around_products(gathered, _computed(work, segment, times.backward), scattered)
            elif segment == "core":
                after_experts += self._core(scattered, times.backward)
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

    def _beside(self, calls: list[PlannedCall]) -> tuple[list[Item], list[Item]]:
        """Weights of the next layer while this one computes, as prefetching software does; else
        now, and nothing beside."""
        if self.software.overlaps_parameters:
            return [Issue(call) for call in calls], [Wait(call) for call in calls]
        return _sync(calls), []

    def _core(self, context: list[PlannedCall], us: float) -> list[Item]:
        core = Compute(us, "attention")
        if self.software.context == "ring":
            return [*map(Issue, context), core, *map(Wait, context)]
        return [*_sync(context), core]

    def _experts(
        self, setup: Setup, work: LayerWork, at: Places, levels: DispatchLevels | None, *, is_forward: bool
    ) -> list[Item]:
        """Dispatch, experts and combine; backward the other way round."""
        beside = self._shared_beside(work, is_forward) if self._has_shared_beside(work, at) else ([], [])
        parts = self._expert_parts(work, at, levels, is_forward=is_forward, puts_off=self.software.puts_off_weights)
        if levels is None and self._hides(setup, parts.out, parts.home):
            chunks = self._chunked(parts.out[0], parts.home[0], parts.computed, parts.later, is_forward)
            return [*parts.first, *chunks, *parts.last]
        return [
            *parts.first,
            *(_out_beside(parts.out, beside[0]) if beside[0] else _sync(parts.out)),
            *parts.computed,
            *_home_beside(parts.home, [*beside[1], parts.later]),
            *parts.last,
        ]

    def _has_shared_beside(self, work: LayerWork, at: Places) -> bool:
        """Whether shared experts compute beside the exchange of tokens; not where there is none, or
        in a dense layer."""
        is_asked = self.software.overlaps_shared and not self.software.hides_dispatch
        return is_asked and bool(work["experts"].forward and at.get("dispatch") and at.get("combine"))

    def _shared_beside(self, work: LayerWork, is_forward: bool) -> tuple[list[Item], list[Item]]:
        """Shared experts' first products, of two (three with a gate), beside the way to the routed
        experts and the last one beside the way home; backward the last one first."""
        whole = work["shared"].forward if is_forward else work["shared"].backward
        matrices = self.job.model.matrices
        last = Compute(whole / matrices, "dense")
        first = Compute(whole - whole / matrices, "dense")
        return ([first], [last]) if is_forward else ([last], [first])

    def _expert_parts(
        self, work: LayerWork, at: Places, levels: DispatchLevels | None, *, is_forward: bool, puts_off: bool = False
    ) -> _ExpertParts:
        """Take what concerns the experts out of ``at``, in order. ``puts_off``: backward, their
        products for weights."""
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
        beyond = [self._of_levels(levels, [*out, *home])] if levels is not None and out and home else []
        return _ExpertParts([first], out, computed, Compute(put_off, "experts"), home, [*beyond, last])

    def _of_levels(self, levels: DispatchLevels, calls: Sequence[PlannedCall]) -> Compute:
        """Count what two levels move in memory beyond a flat dispatch, and the maps of all ranks'
        tokens, which the dispatcher takes for a part of the exchanges' time."""
        moved = self.compute.memory_us(levels.moved_elements * self.software.activation_bytes)
        return _moved(moved + row_maps_us(sum(call.us for call in calls)))

    def _hides(self, setup: Setup, out: list[PlannedCall], home: list[PlannedCall]) -> bool:
        """Whole experts, and one exchange each way: others would need a plan of their own."""
        return self._may_chunk(setup) and len(out) == 1 and len(home) == 1

    def _may_chunk(self, setup: Setup) -> bool:
        return self.software.hides_dispatch and setup.exchange == "all_to_all" and setup.etp == 1

    def _chunked(
        self, out: PlannedCall, home: PlannedCall, computed: list[Compute], later: Compute, is_forward: bool
    ) -> list[Item]:
        """The experts' work in chunks, beside their way to the experts and back, where that is
        worth it; ``later``: what is computed behind it."""
        whole = sum(work.us for work in (*computed, later))
        slices = self._slices(out.plan.traffic, whole / (1 if is_forward else 2))
        if len(slices) == 1:
            return [*_sync([out]), *computed, *_home_beside([home], [later])]
        shares = [part / sum(slices) for part in (slices if is_forward else slices[::-1])]
        outs, homes = [self._share(out, share) for share in shares], [self._share(home, share) for share in shares]
        items: list[Item] = []
        for kind, chunk in posted(len(shares), len(shares)):
            if kind == "dispatch":
                items.append(Issue(outs[chunk]))
            elif kind == "experts":
                works = [*computed, later] if chunk < len(shares) - LATER_CHUNKS else computed
                items += [
                    Wait(outs[chunk]),
                    *(replace(work, us=work.us * shares[chunk]) for work in works if work.us),
                ]
            else:
                items.append(Issue(homes[chunk]))
        left = Compute(later.us * sum(shares[-LATER_CHUNKS:]), later.name)
        return [*items, *([left] if left.us else []), *map(Wait, homes)]

    def _slices(self, traffic: Traffic, work_us: float) -> tuple[int, ...]:
        """In which chunks rows go to experts that work on all of them for ``work_us`` (of each
        product, backward)."""

        def exchange_us(part: float) -> float:
            return self.pricer.us(traffic.collective, round(part), traffic.nodes, traffic.lane)

        key = (traffic, work_us)
        if key not in self._known_slices:
            self._known_slices[key], _ = choose_slices(
                traffic,
                exchange_us,
                lambda part: work_us * part / traffic.logical_bytes,
                puts_off=self.software.puts_off_weights,
            )
        return self._known_slices[key]

    def _share(self, call: PlannedCall, share: float) -> PlannedCall:
        traffic = call.plan.traffic
        size = round(traffic.logical_bytes * share)
        decision = self.pricer.decide(traffic.collective, size, traffic.nodes, traffic.lane)
        return replace(call, plan=decision.plan, us=decision.predicted_us)


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


def _begun(out: Sequence[PlannedCall]) -> list[Item]:
    """The calls to the experts that begin at once."""
    return [Issue(call) for call in out[: _of_one_group(out)]]


def _ended(out: Sequence[PlannedCall]) -> list[Item]:
    """The end of what was begun, and then the others."""
    number = _of_one_group(out)
    return [*map(Wait, out[:number]), *_sync(out[number:])]


def _sent_home(home: Sequence[PlannedCall]) -> list[Item]:
    """The calls from the experts: the last ones begin when those of other groups before them have
    ended."""
    number = len(home) - _of_one_group(home[::-1])
    return [*_sync(home[:number]), *map(Issue, home[number:])]


def _come_home(home: Sequence[PlannedCall]) -> list[Item]:
    return [Wait(call) for call in home[len(home) - _of_one_group(home[::-1]) :]]


def _out_beside(out: Sequence[PlannedCall], work: Sequence[Item]) -> list[Item]:
    """The calls to the experts, and what is computed while the first ones are under way."""
    return [*_begun(out), *work, *_ended(out)]


def _home_beside(home: list[PlannedCall], later: Sequence[Item]) -> list[Item]:
    """The way home, one call after another, and what is computed while the last of them is under
    way."""
    return [*_sync(home[:-1]), *map(Issue, home[-1:]), *sequence(later), *map(Wait, home[-1:])]


def _beside_product(calls: list[PlannedCall], work: Compute) -> list[Item]:
    return [*map(Issue, calls), work, *map(Wait, calls)]


def _around_products(gathered: list[PlannedCall], work: Compute, scattered: list[PlannedCall]) -> list[Item]:
    """A sequence gathered again beside one half of the products, and sums scattered beside the
    other."""
    half = Compute(work.us / 2, work.name)
    return [*_beside_product(gathered, half), *_beside_product(scattered, half)]


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


def _renamed(program: Iterable[Item]) -> list[Item]:
    return [replace(item, name="recompute") if isinstance(item, Compute) else item for item in program]


def _check_places(work: LayerWork, at: Places) -> None:
    unknown = at.keys() - {*work.order.names, "parameters", "gradients"}
    if unknown:
        raise InternalError(f"calls at {', '.join(sorted(unknown))} have no place in a layer's program")


def _is_serial(program: Sequence[Item]) -> bool:
    """Whether nothing is under way while something else is."""
    for this, following in zip(program, [*program[1:], None], strict=True):
        if isinstance(this, Issue) and not (isinstance(following, Wait) and following.call is this.call):
            return False
    return True


def _broken_down(forecast: conflicts.Forecast, program: Sequence[Item]) -> Breakdown:
    """A forecast's times by part, lane and link. What computation took, it took as it was
    stretched."""
    found = Breakdown(total_us=forecast.total_us)
    for name, start, end in forecast.computed:
        found.parts[name] = found.parts.get(name, 0.0) + end - start
    calls = [item.call for item in program if isinstance(item, Wait)]
    for call, (_, start, end) in zip(calls, forecast.waited, strict=True):
        found.wait(call, end - start)
    return found
