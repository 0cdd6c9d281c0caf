"""A layer's program from its work (:mod:`layer_work`) and its calls (:mod:`layer_calls`), for one job, cluster and software."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import count

from commlayer.profiles.errors import InternalError
from commlayer.profiles.links import Resource
from commlayer.profiles.profile import Profile
from commlayer.scheduler import conflicts
from commlayer.scheduler.mapping.cluster import Cluster
from commlayer.scheduler.mapping.exchange import SEND_RECV, Exchange
from commlayer.scheduler.mapping.job import Job, Setup
from commlayer.scheduler.mapping.layer_calls import layer_backward, layer_forward
from commlayer.scheduler.mapping.layer_program import Course, Finish, Move, Part, Send, Work, bind, run, sequence
from commlayer.scheduler.mapping.layer_work import AnyCompute, LayerWork, layer_work
from commlayer.scheduler.mapping.pricing import Pricer
from commlayer.scheduler.mapping.software import Software, splits_ffn
from commlayer.scheduler.overlap import choose_slices
from commlayer.scheduler.plan import Strategy
from commlayer.scheduler.strategies import build
from commlayer.scheduler.traffic import Traffic

__all__ = ["LayerBuilder", "group_nodes"]

_AGAIN = "_again"
_PARTS = {
    "counts": "dispatch",
    "dispatch": "dispatch",
    "gather_experts": "dispatch",
    "scatter_experts": "combine",
    "combine": "combine",
    "router": "dispatch",
    "gradients": "gradients",
    "parameters": "parameters",
    "dp": "gradients",
}
"""As what a call counts, by its place, or by its lane; others as their lane."""
_GATHERED = ("before_attention", "before_ffn")
Places = dict[str, list[Move]]


class LayerBuilder:
    """Makes programs of layers and times them.

    ``pricer``: of the collectives, by the run time's own plans; ``compute``: of everything else.
    """

    def __init__(self, job: Job, cluster: Cluster, software: Software, pricer: Pricer, compute: AnyCompute) -> None:
        self.job, self.cluster, self.software, self.pricer, self.compute = job, cluster, software, pricer, compute

    def move(self, setup: Setup, exchange: Exchange) -> Move:
        """The call of an exchange (once), by the plan that the run time would choose."""
        nodes = group_nodes(self.cluster, setup, exchange)
        part = _PARTS.get(exchange.place) or _PARTS.get(exchange.lane, exchange.lane)
        named = partial(Move, exchange.name, part, exchange.axis, exchange.lane)
        if sum(nodes) == 1 or not exchange.logical_bytes:
            return named(0.0, None, None)
        profile = self.cluster.profile_of(nodes)
        if exchange.collective == SEND_RECV:
            us = exchange.count * self.pricer.us(SEND_RECV, exchange.logical_bytes, nodes)
            plan = build(_around(exchange, nodes), Strategy.FLAT)
            return named(us, plan, profile, (us,))
        lane = exchange.lane if self.software.lanes else ""  # who yields to nobody is not cut for it
        decision = self.pricer.decide(exchange.collective, exchange.logical_bytes, nodes, lane)
        return named(decision.predicted_us, decision.plan, profile)

    def forward(self, setup: Setup, is_moe: bool = True) -> list[Part]:
        """One layer's forward pass of a micro-batch."""
        work = layer_work(self.job, setup, self.compute, is_moe, splits_ffn(self.software, setup.attention))
        return self._forward(
            setup, work, self._places(setup, layer_forward(self.job, setup, self.software, moe=is_moe))
        )

    def backward(self, setup: Setup, is_moe: bool = True) -> list[Part]:
        """One layer's backward pass of a micro-batch, with what is computed and sent again for it."""
        work = layer_work(self.job, setup, self.compute, is_moe, splits_ffn(self.software, setup.attention))
        exchanges = layer_backward(self.job, setup, self.software, moe=is_moe)
        again = [each for each in exchanges if each.name.endswith(_AGAIN)]
        at = self._places(setup, [each for each in exchanges if not each.name.endswith(_AGAIN)])
        resent = self._places(setup, again)
        if setup.recompute == "full":
            # What the forward pass sends comes first; a sequence that is gathered once more for a weight's gradient after it.
            gathered = {place: resent[place][1:] for place in _GATHERED if len(resent.get(place, ())) > 1}
            resent |= {place: resent[place][:1] for place in gathered}
            return sequence(_renamed(self._forward(setup, work, resent)), self._backward(setup, work, at, gathered))
        if setup.recompute == "selective":
            weights = {"parameters": resent.pop("parameters")} if "parameters" in resent else {}
            first = [Send(move) for moves in resent.values() for move in moves]
            last = [Finish(move) for moves in resent.values() for move in moves]
            # Its calls run beside what is computed again; what they do not hide is waited for at once.
            return sequence(first, Work("recompute", work.remade()), last, self._backward(setup, work, at, weights))
        return self._backward(setup, work, at, resent)

    def course(self, parts: Sequence[Part]) -> Course:
        """How ``parts`` go, with calls of different axes in each other's way."""
        return run(parts) if _is_serial(parts) else self.simulated(parts)[0]

    def simulated(self, parts: Sequence[Part]) -> tuple[Course, conflicts.Forecast]:
        """The same by :func:`commlayer.scheduler.conflicts.simulate`, always."""
        numbers = count()
        program = list(bind(parts, "", lambda: next(numbers)))
        policy = self.pricer.policy.lanes if self.software.lanes else None
        forecast = conflicts.simulate(program, self._any_profile(parts), policy)
        return _course_of(forecast, parts), forecast

    def _any_profile(self, parts: Sequence[Part]) -> Profile:
        """For how much resources slow each other down; every call brings the curves of its group."""
        found = (part.move.profile for part in parts if isinstance(part, Send) and part.move.profile is not None)
        return next(found, None) or self.cluster.profile_of((1,))

    def _places(self, setup: Setup, exchanges: Iterable[Exchange]) -> Places:
        found: Places = {}
        for each in exchanges:
            found.setdefault(each.place, []).append(self.move(setup, each))
        return found

    def _forward(self, setup: Setup, work: LayerWork, at: Places) -> list[Part]:
        is_tensor = setup.attention == "tensor"
        before, after = _sync(at.pop("before_attention", [])), _sync(at.pop("after_attention", []))
        parameters = at.pop("parameters", [])
        first, last = self._beside(parameters)
        parts = sequence(
            first,
            Work("memory", work.norm.forward),
            before if is_tensor else [],
            Work("attention", work.projections.forward),
            Work("memory", work.rotation.forward),
            [] if is_tensor else before,
            self._core(at.pop("context", []), work.core.forward),
            [] if is_tensor else after,
            Work("attention", work.out.forward),
            after if is_tensor else [],
            Work("memory", work.middle.forward),
            Work("dense", work.router.forward),
            _sync(at.pop("router", [])),
            _sync(at.pop("counts", [])),
            _sync(at.pop("before_ffn", [])),
            Work("dense", work.shared.forward),
            self._experts(setup, work, at, is_forward=True),
            _sync(at.pop("after_ffn", [])),
            last,
        )
        _check_used(at)
        return parts

    def _backward(self, setup: Setup, work: LayerWork, at: Places, again: Places) -> list[Part]:
        is_tensor = setup.attention == "tensor"
        before, after = at.pop("before_attention", []), _sync(at.pop("after_attention", []))
        first, last = self._beside(again.pop("parameters", []))
        first_sum, last_sum = self._beside(at.pop("gradients", []))
        if first_sum and not self.software.overlaps_gradients:
            first_sum, last_sum = [], _sync([part.move for part in first_sum if isinstance(part, Send)])
        parts = sequence(
            first,
            first_sum,
            _sync(at.pop("after_ffn", [])),
            _around_products(
                again.pop("before_ffn", []), Work("dense", work.shared.backward), at.pop("before_ffn", [])
            ),
            self._experts(setup, work, at, is_forward=False),
            Work("dense", work.router.backward),
            Work("memory", work.middle.backward),
            after if is_tensor else [],
            Work("attention", work.out.backward),
            [] if is_tensor else after,
            self._core(at.pop("context", []), work.core.backward),
            [] if is_tensor else _sync(before),
            Work("memory", work.rotation.backward),
            _beside_product(again.pop("before_attention", []), Work("attention", work.projections.input_gradient)),
            _beside_product(before if is_tensor else [], Work("attention", work.projections.weight_gradient)),
            Work("memory", work.norm.backward),
            last,
            last_sum,
        )
        _check_used(at)
        _check_used(again)
        return parts

    def _beside(self, moves: list[Move]) -> tuple[list[Part], list[Part]]:
        """Weights of the next layer while this one computes, as prefetching software does; else now, and nothing beside."""
        if self.software.overlaps_parameters:
            return [Send(move) for move in moves], [Finish(move) for move in moves]
        return _sync(moves), []

    def _core(self, context: list[Move], us: float) -> list[Part]:
        core = Work("attention", us)
        if self.software.context == "ring":
            return [*map(Send, context), core, *map(Finish, context)]
        return [*_sync(context), core]

    def _experts(self, setup: Setup, work: LayerWork, at: Places, *, is_forward: bool) -> list[Part]:
        """Dispatch, experts and combine; backward the other way round."""
        out = [*at.pop("dispatch", []), *at.pop("gather_experts", [])]
        home = [*at.pop("scatter_experts", []), *at.pop("combine", [])]
        if is_forward:
            computed = [Work("experts", work.experts.forward), Work("memory", work.expert_memory.forward)]
            first, last = Work("memory", work.permute.forward), Work("memory", work.unpermute.forward)
        else:
            computed = [Work("experts", work.experts.backward), Work("memory", work.expert_memory.backward)]
            first, last = Work("memory", work.unpermute.backward), Work("memory", work.permute.backward)
            out, home = home[::-1], out[::-1]
        if self._hides(setup, out, home):
            return [first, *self._chunked(out[0], home[0], computed, is_forward), last]
        return [first, *_sync(out), *computed, *_sync(home), last]

    def _hides(self, setup: Setup, out: list[Move], home: list[Move]) -> bool:
        """Whole experts, and one exchange each way: others would need a plan of their own."""
        is_one = len(out) == 1 and len(home) == 1
        return self.software.hides_dispatch and setup.dispatch == "all_to_all" and setup.etp == 1 and is_one

    def _chunked(self, out: Move, home: Move, computed: list[Work], is_forward: bool) -> list[Part]:
        """In the order in which the dispatcher posts (:func:`commlayer.scheduler.overlap.pipeline`)."""
        if out.plan is None or home.plan is None or out.profile is None:
            return [*_sync([out]), *computed, *_sync([home])]
        traffic, whole = out.plan.traffic, sum(work.us for work in computed)
        size = traffic.logical_bytes

        def exchange_us(part: float) -> float:
            return self.pricer.us(traffic.collective, round(part), traffic.nodes, traffic.lane)

        slices, _ = choose_slices(traffic, exchange_us, lambda part: whole / (1 if is_forward else 2) * part / size)
        if len(slices) == 1:
            return [*_sync([out]), *computed, *_sync([home])]
        slices = slices if is_forward else slices[::-1]
        ahead = 1 if is_forward else len(slices)
        return self._pipeline(out, home, computed, [part / sum(slices) for part in slices], ahead)

    def _pipeline(self, out: Move, home: Move, computed: list[Work], shares: list[float], ahead: int) -> list[Part]:
        outs = [self._share(out, share) for share in shares]
        homes = [self._share(home, share) for share in shares]
        parts: list[Part] = []
        sent = 0
        for chunk, share in enumerate(shares):
            while sent < min(chunk + 1 + ahead, len(shares)):
                parts.append(Send(outs[sent]))
                sent += 1
            parts.append(Finish(outs[chunk]))
            parts += [Work(work.part, work.us * share) for work in computed]
            parts.append(Send(homes[chunk]))
        return [*parts, *map(Finish, homes)]

    def _share(self, move: Move, share: float) -> Move:
        if move.plan is None:
            raise InternalError(f"{move.name} has no plan to cut")
        traffic = move.plan.traffic
        size = round(traffic.logical_bytes * share)
        decision = self.pricer.decide(traffic.collective, size, traffic.nodes, traffic.lane)
        return Move(move.name, move.part, move.axis, move.lane, decision.predicted_us, decision.plan, move.profile)


def group_nodes(cluster: Cluster, setup: Setup, exchange: Exchange) -> tuple[int, ...]:
    """Ranks of the exchange's group on each domain; of messages, the two that may be furthest apart."""
    layout = ((setup.gpus, 1),) if exchange.axis == "world" else setup.layout(exchange.axis)
    nodes = cluster.nodes_of(layout, setup.gpus)
    if exchange.collective != SEND_RECV or sum(nodes) == 1:
        return nodes
    return (1, 1) if len(nodes) > 1 else (2,)


def _around(exchange: Exchange, nodes: tuple[int, ...]) -> Traffic:
    """Of a ring's rounds together, as one call: what every rank has comes to every other."""
    link = Resource.INTER if len(nodes) > 1 else Resource.INTRA
    size = sum(nodes)
    return Traffic(exchange.logical_bytes * size, size, link=link, collective="all_gather", nodes=nodes)


def _sync(moves: Iterable[Move]) -> list[Part]:
    return [part for move in moves for part in (Send(move), Finish(move))]


def _beside_product(moves: list[Move], work: Work) -> list[Part]:
    return [*map(Send, moves), work, *map(Finish, moves)]


def _around_products(gathered: list[Move], work: Work, scattered: list[Move]) -> list[Part]:
    """A sequence gathered again beside one half of the products, and sums scattered beside the other."""
    half = Work(work.part, work.us / 2)
    return [*_beside_product(gathered, half), *_beside_product(scattered, half)]


def _renamed(parts: Iterable[Part]) -> list[Part]:
    return [Work("recompute", part.us) if isinstance(part, Work) else part for part in parts]


def _check_used(at: Places) -> None:
    if at:
        raise InternalError(f"calls at {', '.join(at)} have no place in a layer's program")


def _is_serial(parts: Sequence[Part]) -> bool:
    """Whether nothing is under way while something else is."""
    for this, following in zip(parts, [*parts[1:], None], strict=True):
        if isinstance(this, Send) and not (isinstance(following, Finish) and following.move is this.move):
            return False
    return True


def _course_of(forecast: conflicts.Forecast, parts: Sequence[Part]) -> Course:
    """A forecast's times by part, lane and link. What computation took, it took as it was stretched."""
    course = Course(total_us=forecast.total_us)
    for name, start, end in forecast.computed:
        course.parts[name] = course.parts.get(name, 0.0) + end - start
    moves = [part.move for part in parts if isinstance(part, Finish)]
    for move, (_, start, end) in zip(moves, forecast.waited, strict=True):
        course.wait(move, end - start)
    return course
