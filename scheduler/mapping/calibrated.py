"""Factors on a GPU's declared rates of products and attention, by model: with them estimates have a published MFU.

Written by `make papers ARGS=--calibrate` on 2026-11-24, for h100-eos. The rows: MoE Parallel Folding (arXiv:2504.14960), table 3,
MCore without folding.
"""

FACTORS = {
    "mixtral-8x22b": 0.9478,  # MFU 0.463 on 128 GPUs: TP2 CP1 EP4 ETP2 PP8 VPP7 DP8, micro-batch 1, unfolded
    "qwen2-57b-a14b": 0.9525,  # MFU 0.353 on 64 GPUs: TP2 CP1 EP4 ETP2 PP4 VPP7 DP8, micro-batch 1, unfolded
    "mixtral-8x22b-g8t8": 0.7132,  # MFU 0.171 on 128 GPUs: TP2 CP1 EP8 ETP2 PP8 VPP7 DP8, micro-batch 1, unfolded
    "llama3-8x70b": 1.0866,  # MFU 0.388 on 256 GPUs: TP8 CP1 EP4 ETP8 PP8 VPP10 DP4, micro-batch 1, unfolded
}
