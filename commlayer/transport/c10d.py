"""torch's collectives on whole tensors under their present names: torch 2.13 has given them new ones, and warns about the old."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
