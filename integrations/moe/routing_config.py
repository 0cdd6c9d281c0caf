"""The configuration of a router: how tokens choose experts, what balances them, what is dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from commlayer.integrations.moe.capacity import capacity
from commlayer.profiles.errors import UsageError

__all__ = ["RouterConfig"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The configuration of a :class:`~commlayer.integrations.moe.router.Router`.

    Args:
        num_experts: E, of the whole layer.
        top_k: K, choices per token.
        score: ``softmax`` over the experts, or ``sigmoid`` of each logit.
        order: ``softmax_topk``: probabilities over all experts, then the K highest. ``topk_softmax``: the K highest logits,
            then softmax over these; the weights sum to 1. Only for ``score="softmax"``.
        normalise: divide the K scores by their sum. One choice is left as it is: its weight would be 1 whatever the router
            thinks, and the router would not learn (so in Megatron-Core and DeepSeek-V3).
        scaling_factor: multiplies the weights, after normalising.
        num_groups: G; experts are taken from the ``top_groups`` best groups of consecutive experts alone. A group counts as
            its highest score; with a bias as the sum of its two highest, as in DeepSeek-V3's inference code (``Gate``).
        top_groups: see ``num_groups``.
        bias_update_rate: loss-free balancing: a bias per expert is added to the scores for the choice, not for the weights;
            :meth:`Router.update_bias` moves it by this much. 0: there is a bias, which stays. None: there is none. Only for
            ``score="sigmoid"``.
        aux_loss_coefficient: of the balance loss per expert; see :func:`balance.expert_balance_loss`.
        device_aux_loss_coefficient: of the balance loss per device; see :func:`balance.device_balance_loss`.
        z_loss_coefficient: of the mean of ``logsumexp(logits)²`` (ST-MoE, Zoph et al. 2022, equation 5).
        attach_losses: losses join the backward pass through the weights, and ``Routing.losses`` only reports them. False:
            ``Routing.losses`` carries gradients, and the caller adds them to the main loss.
        num_devices: D; the experts of a device are consecutive.
        capacity_factor: an expert takes ``ceil(capacity_factor · T·K / E)`` choices; the others are dropped. None: dropless.
        device_capacity_factor: a device takes ``ceil(device_capacity_factor · T·K / D)`` of what its experts kept.
        drop_scope: T counts, and choices compete within, the tokens of one call (``subsequence``), or those of all ranks
            that share the sequence (``sequence``).
        drop_policy: which are kept: those of the highest weight (``probability``), or the earliest (``position``).
        pad_to_capacity: the dispatcher is to fill every expert's rows up to the capacity, for static shapes.

    Raises:
        UsageError: what does not go together, and what to change.
    """

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    order: Literal["softmax_topk", "topk_softmax"] = "softmax_topk"
    normalise: bool = True
    scaling_factor: float = 1.0
    num_groups: int | None = None
    top_groups: int | None = None
    bias_update_rate: float | None = None
    aux_loss_coefficient: float = 0.0
    device_aux_loss_coefficient: float = 0.0
    z_loss_coefficient: float = 0.0
    attach_losses: bool = True
    num_devices: int | None = None
    capacity_factor: float | None = None
    device_capacity_factor: float | None = None
    drop_scope: Literal["subsequence", "sequence"] = "subsequence"
    drop_policy: Literal["probability", "position"] = "probability"
    pad_to_capacity: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "top_groups", "num_devices"):
            value = getattr(self, name)
            is_whole = type(value) is int and value >= 1
            _require(value is None or is_whole, f"{name} must be an int, 1 or more, got {value!r}")
        for name in ("scaling_factor", "capacity_factor", "device_capacity_factor"):
            value = getattr(self, name)
            is_positive = isinstance(value, (int, float)) and 0 < value < math.inf
            _require(value is None or is_positive, f"{name} must be a positive number, got {value!r}")
        rates = "aux_loss_coefficient", "device_aux_loss_coefficient", "z_loss_coefficient", "bias_update_rate"
        for name in rates:
            value = getattr(self, name)
            is_rate = isinstance(value, (int, float)) and 0 <= value < math.inf
            _require(value is None or is_rate, f"{name} must be a number, 0 or more, got {value!r}")
        for name, words in _WORDS.items():
            value = getattr(self, name)
            _require(value in words, f"{name} must be {words[0]!r} or {words[1]!r}, got {value!r}")
        _require(
            self.top_k <= self.num_experts,
            f"top_k {self.top_k} of {self.num_experts} experts: choose {self.num_experts} at most",
        )
        if self.order == "topk_softmax":
            _require(self.score == "softmax", "order='topk_softmax' is for score='softmax': a sigmoid has no order")
            _require(self.normalise, "order='topk_softmax' always normalises: leave normalise, or use 'softmax_topk'")
            _require(
                self.top_k > 1,
                "order='topk_softmax' with top_k 1 gives every token the weight 1, and the router learns nothing: "
                "use order='softmax_topk'",
            )
        _require(
            self.bias_update_rate is None or self.score == "sigmoid",
            "bias_update_rate is for score='sigmoid': use that, or balance by aux_loss_coefficient",
        )
        self._check_groups()
        _require(
            self.capacity_factor is not None or not self.pad_to_capacity,
            "pad_to_capacity needs a capacity_factor: without one there is no capacity to pad to",
        )
        devices = self.num_devices
        per_device = self.device_capacity_factor is not None or self.device_aux_loss_coefficient > 0
        _require(
            devices is not None or not per_device,
            "device_capacity_factor and device_aux_loss_coefficient need num_devices",
        )
        _require(
            devices is None or self.num_experts % devices == 0,
            f"{self.num_experts} experts on {devices} devices: num_devices must divide num_experts",
        )

    def _check_groups(self) -> None:
        groups, top = self.num_groups, self.top_groups
        if groups is None or top is None:
            _require(groups is top, f"set num_groups ({groups}) and top_groups ({top}) together, or neither")
            return
        _require(
            self.num_experts % groups == 0,
            f"{self.num_experts} experts in {groups} groups: num_groups must divide num_experts",
        )
        _require(top <= groups, f"top_groups {top} of {groups} groups: choose {groups} at most")
        within = top * (self.num_experts // groups)
        _require(
            self.top_k <= within,
            f"top_k {self.top_k} from {top} groups with {within} experts together: raise top_groups or lower top_k",
        )

    @property
    def is_dropless(self) -> bool:
        return self.capacity_factor is None and self.device_capacity_factor is None

    def capacities(self, num_choices: int) -> tuple[int | None, int | None]:
        """Return the capacity of an expert and that of a device, for T·K choices; None: they take all."""
        expert, device = self.capacity_factor, self.device_capacity_factor
        return (
            None if expert is None else capacity(expert, num_choices, self.num_experts),
            None if device is None or self.num_devices is None else capacity(device, num_choices, self.num_devices),
        )


_WORDS = {
    "score": ("softmax", "sigmoid"),
    "order": ("softmax_topk", "topk_softmax"),
    "drop_scope": ("subsequence", "sequence"),
    "drop_policy": ("probability", "position"),
}


def _require(is_so: bool, message: str) -> None:
    if not is_so:
        raise UsageError(message)
