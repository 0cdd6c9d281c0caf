"""The recorder of expert loads, for ``COMMLAYER_ROUTING=folder``: what a layer's ranks tell each other of their choices is kept.

Dispatch exchanges these counts anyway, on the host, so nothing is computed on a device or waited for. One rank of each expert
group keeps them, and writes a file when the program ends. Of a long run neighbouring calls are added up, so memory stays bounded.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from commlayer.integrations.mesh import pipeline_stage
from commlayer.integrations.moe.dispatch_groups import ExpertGrid
from commlayer.profiles.printable import warn
from commlayer.readers.routing_files import routing_path, write_routing
from commlayer.scheduler.placement.expert_loads import ExpertLoads
from commlayer.settings import Settings

if TYPE_CHECKING:
    from commlayer.integrations.moe.expert_slots import ExpertSlots
    from commlayer.integrations.moe.handle import ChoiceCounts

__all__ = ["LayerRecord", "LoadRecorder", "layer_record"]

_MOST_STEPS = 2048


class LayerRecord:
    """The record of one layer.

    ``name``: in the file; the place among this rank's layers, as they were made, in a pipeline behind that of the stage, unless
    somebody who knows better sets it, as a model that knows its layers' numbers does. ``most``: steps that are kept; twice as
    many are added up in pairs.
    """

    def __init__(self, name: str, num_experts: int, most: int = _MOST_STEPS) -> None:
        self.name, self.num_experts, self.most = name, num_experts, most
        self.stride, self.top_k = 1, 0
        self._steps: list[Any] = []
        self._sum, self._summed = None, 0
        self._is_refused = False

    def add(self, layout: ChoiceCounts, slots: ExpertSlots | None = None) -> None:
        """Keep the counts of a call, of experts or of ``slots``. Padded rows are not choices: of a layer that pads them nothing
        is kept, and that is told."""
        if layout.capacity is not None:
            if not self._is_refused:
                warn(
                    f"COMMLAYER_ROUTING: {self.name} pads its rows to a capacity, so its counts say nothing of the routing: "
                    "nothing is recorded. Leave pad_to_capacity out",
                    stacklevel=2,
                )
            self._is_refused = True
            return
        self.top_k = max(self.top_k, layout.indices.shape[1])
        counts = layout.counts.sum((0, 1, 2))
        self.add_counts((counts if slots is None else slots.by_expert(counts)).numpy())

    def add_counts(self, counts: Any) -> None:
        """Keep the choices of each expert, an array [experts] of whole numbers."""
        self._sum = counts if self._sum is None else self._sum + counts
        self._summed += 1
        if self._summed < self.stride:
            return
        self._steps.append(self._sum)
        self._sum, self._summed = None, 0
        if len(self._steps) >= 2 * self.most:
            self._steps = [a + b for a, b in zip(self._steps[::2], self._steps[1::2], strict=True)]
            self.stride *= 2

    def loads(self) -> ExpertLoads | None:
        """Return the record; None where there is none."""
        import numpy as np

        if not self._steps or not self.top_k:
            return None
        return ExpertLoads(np.stack(self._steps)[:, None], (self.name,), self.top_k, self.stride, "recorded")


class LoadRecorder:
    """The records of this rank's layers, and the file in ``folder`` that they are written to when the program ends."""

    def __init__(self, folder: str, rank: int) -> None:
        self.path = routing_path(folder, rank)
        self.layers: list[LayerRecord] = []
        self._pid = os.getpid()
        atexit.register(self.write)

    def write(self) -> None:
        """Write what was recorded; nothing where nothing was, and in a child that was forked. Again: the file anew.

        An error is told, not raised: a run of days shall not fail at its end because of a full disk.
        """
        loads_of_layers = [loads for layer in self.layers if (loads := layer.loads()) is not None]
        if not loads_of_layers or os.getpid() != self._pid:
            return
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            write_routing(self.path, ExpertLoads.added(loads_of_layers))
        except (OSError, ValueError) as error:
            warn(f"COMMLAYER_ROUTING: {self.path} was not written: {error}", stacklevel=2)


_recorders: dict[str, LoadRecorder] = {}


def layer_record(grid: ExpertGrid, num_experts: int) -> LayerRecord | None:
    """Make the record of a layer with these groups and so many experts; None on ranks that keep none, and unless asked
    for one."""
    settings = Settings.from_environment()
    folder = settings.in_replica(settings.routing)
    if folder is None or grid.all.rank:
        return None
    if folder not in _recorders:
        _recorders[folder] = LoadRecorder(folder, grid.all.ranks[grid.all.rank])
    layers, stage = _recorders[folder].layers, pipeline_stage(grid.all.group)
    # How many layers the stages before have is not known here, and layers of one name would be added up.
    label = f"layer {len(layers)}" if stage is None else f"stage {stage}, layer {len(layers)}"
    layers.append(LayerRecord(label, num_experts))
    return layers[-1]
