"""Published training runs and how far off their predictions were: what :mod:`commlayer.scheduler.mapping.validity`
knows.

Written by `make published`. A row: its key in docs/published.md or docs/papers.md; predicted over published throughput, less
1; its kind, as the fields of :class:`commlayer.scheduler.mapping.validity.CaseKind`.
"""

ROWS: tuple[tuple[str, float, tuple[str, str, str, str, str, bool, bool, str, str, int, int]], ...] = (
    (
        "megatron-bridge 25.09/deepseek-v3/256 gb200/fp8/TP1 PP4 VPP4 EP64 mb1 batch 2048 tokendrop",
        0.2068,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 25.09/qwen3-30b-a3b/8 gb200/fp8/TP1 PP1 VPP1 EP8 mb4 batch 512 tokendrop",
        0.3864,
        ("blackwell", "fp8", "nccl", "inside", "none", True, False, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "megatron-bridge 25.09/qwen3-235b-a22b/64 gb200/fp8/TP2 PP1 VPP1 EP64 mb1 batch 1024 tokendrop",
        0.2483,
        ("blackwell", "fp8", "nccl", "inside", "none", True, False, "qwen3-235b-a22b", "gqa", 235, 64),
    ),
    (
        "megatron-bridge 25.09/deepseek-v3/256 b200/fp8/TP1 PP16 VPP1 EP8 mb1 batch 2048 tokendrop",
        0.3392,
        ("blackwell", "fp8", "nccl", "inside", "none", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 25.09/qwen3-30b-a3b/8 b200/fp8/TP1 PP1 VPP1 EP8 mb1 batch 512 tokendrop",
        0.4235,
        ("blackwell", "fp8", "nccl", "inside", "none", True, False, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "megatron-bridge 25.09/qwen3-235b-a22b/64 b200/fp8/TP1 PP8 VPP2 EP8 mb1 batch 1024 tokendrop",
        0.3657,
        ("blackwell", "fp8", "nccl", "inside", "none", True, False, "qwen3-235b-a22b", "gqa", 235, 64),
    ),
    (
        "megatron-bridge 25.09/deepseek-v3/1024 h100/fp8/TP2 PP8 VPP4 EP64 mb1 batch 8192 dropless",
        -0.1538,
        ("hopper", "fp8", "deepep", "between", "none", False, False, "deepseek-v3", "mla", 683, 1024),
    ),
    (
        "megatron-bridge 25.09/qwen3-30b-a3b/16 h100/fp8/TP1 PP2 VPP24 EP8 mb2 batch 512 tokendrop",
        0.2356,
        ("hopper", "fp8", "nccl", "inside", "none", False, False, "qwen3-30b-a3b", "gqa", 31, 16),
    ),
    (
        "megatron-bridge 25.09/qwen3-235b-a22b/256 h100/fp8/TP2 PP8 VPP4 EP32 mb1 batch 2048 tokendrop",
        0.2959,
        ("hopper", "fp8", "nccl", "between", "merged", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 25.11/deepseek-v3/256 gb300/bf16/TP1 PP2 VPP4 EP32 mb1 batch 4096 w/o MTP",
        -0.0124,
        ("blackwell", "bf16", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 671, 256),
    ),
    (
        "megatron-bridge 25.11/deepseek-v3/256 gb300/mxfp8/TP1 PP2 VPP4 EP32 mb1 batch 4096 w/o MTP",
        0.0989,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 671, 256),
    ),
    (
        "megatron-bridge 25.11/gpt-oss-120b/64 gb300/bf16/TP1 PP1 VPP1 EP64 mb2 batch 1280 seq 8192",
        0.2723,
        ("blackwell", "bf16", "nccl", "inside", "none", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 25.11/qwen3-30b-a3b/8 gb300/mxfp8/TP1 PP1 VPP1 EP8 mb4 batch 512",
        0.2345,
        ("blackwell", "fp8", "hybridep", "inside", "none", True, False, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "megatron-bridge 25.11/qwen3-235b-a22b/256 gb300/bf16/TP1 PP4 VPP12 EP16 mb2 batch 8192",
        -0.0483,
        ("blackwell", "bf16", "hybridep", "inside", "none", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 25.11/deepseek-v3/256 gb200/bf16/TP1 PP4 VPP4 EP64 mb1 batch 4096 w/o MTP",
        0.1481,
        ("blackwell", "bf16", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 671, 256),
    ),
    (
        "megatron-bridge 25.11/deepseek-v3/256 gb200/mxfp8/TP1 PP8 VPP4 EP32 mb1 batch 4096 w/o MTP",
        0.094,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 671, 256),
    ),
    (
        "megatron-bridge 25.11/gpt-oss-120b/64 gb200/bf16/TP1 PP1 VPP1 EP64 mb1 batch 1280 seq 8192",
        0.346,
        ("blackwell", "bf16", "nccl", "inside", "none", True, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.04.01/qwen3-30b-a3b/8 gb200/mxfp8/TP1 PP1 VPP1 EP8 mb4 batch 512",
        0.3493,
        ("blackwell", "fp8", "hybridep", "inside", "none", True, False, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "megatron-bridge 25.11/qwen3-235b-a22b/256 gb200/bf16/TP1 PP8 VPP3 EP32 mb1 batch 8192",
        0.071,
        ("blackwell", "bf16", "hybridep", "inside", "none", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 25.11/deepseek-v3/256 b200/mxfp8/TP1 PP16 VPP1 EP8 mb1 batch 2048 w/ MTP",
        0.381,
        ("blackwell", "fp8", "nccl", "inside", "none", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 25.11/gpt-oss-120b/64 b200/bf16/TP1 PP1 VPP1 EP8 mb4 batch 512",
        1.0942,
        ("blackwell", "bf16", "nccl", "inside", "none", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.02/qwen3-30b-a3b/8 b200/mxfp8/TP1 PP1 VPP1 EP8 mb1 batch 512",
        1.4948,
        ("blackwell", "fp8", "nccl", "inside", "none", True, False, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "megatron-bridge 25.11/qwen3-235b-a22b/64 b200/mxfp8/TP1 PP8 VPP2 EP8 mb1 batch 1024",
        0.8663,
        ("blackwell", "fp8", "nccl", "inside", "merged", True, False, "qwen3-235b-a22b", "gqa", 235, 64),
    ),
    (
        "megatron-bridge 25.11/gpt-oss-120b/64 h100/bf16/TP1 PP4 VPP1 EP8 mb4 batch 512",
        0.2276,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 25.11/qwen3-30b-a3b/16 h100/fp8/TP1 PP2 VPP24 EP8 mb2 batch 512",
        1.5848,
        ("hopper", "fp8", "deepep", "inside", "none", False, False, "qwen3-30b-a3b", "gqa", 31, 16),
    ),
    (
        "megatron-bridge 25.11/qwen3-235b-a22b/256 h100/fp8/TP2 PP8 VPP4 EP32 mb1 batch 2048",
        -0.0465,
        ("hopper", "fp8", "nccl", "between", "merged", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 26.04.01/deepseek-v3/256 gb300/mxfp8/TP1 PP2 VPP8 EP32 mb2 batch 4096",
        -0.0407,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 26.02.01/deepseek-v3/256 gb200/mxfp8/TP1 PP4 VPP4 EP64 mb1 batch 4096",
        0.0775,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 26.04/deepseek-v3/256 b300/mxfp8/TP1 PP16 VPP1 EP8 mb1 batch 4096",
        0.1107,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 26.04/deepseek-v3/256 b200/mxfp8/TP1 PP16 VPP1 EP8 mb1 batch 4096",
        0.1976,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 26.04.01/gpt-oss-120b/64 gb300/bf16/TP1 PP1 VPP1 EP64 mb4 batch 1280",
        0.2712,
        ("blackwell", "bf16", "nccl", "inside", "none", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.04/gpt-oss-120b/64 gb200/bf16/TP1 PP1 VPP1 EP64 mb4 batch 1280",
        0.4627,
        ("blackwell", "bf16", "nccl", "inside", "none", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.02/gpt-oss-120b/64 b300/bf16/TP1 PP1 VPP1 EP64 mb4 batch 1280",
        0.5151,
        ("blackwell", "bf16", "nccl", "between", "none", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.02/gpt-oss-120b/64 b200/bf16/TP1 PP1 VPP1 EP64 mb4 batch 1280",
        0.0301,
        ("blackwell", "bf16", "nccl", "between", "none", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.04.01/gpt-oss-120b/64 h100/bf16/TP1 PP4 VPP1 EP8 mb1 batch 1280",
        0.2994,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.04.01/qwen3-30b-a3b/8 gb300/mxfp8/TP1 PP1 VPP1 EP8 mb8 batch 512",
        0.1571,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "megatron-bridge 26.04.01/qwen3-30b-a3b/8 b300/mxfp8/TP1 PP1 VPP1 EP8 mb8 batch 512",
        0.1786,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "megatron-bridge 26.02.01/qwen3-30b-a3b/16 h100/fp8/TP1 PP2 VPP12 EP8 mb1 batch 1024",
        0.4246,
        ("hopper", "fp8", "deepep", "inside", "none", True, False, "qwen3-30b-a3b", "gqa", 31, 16),
    ),
    (
        "megatron-bridge 26.02.01/qwen3-235b-a22b/256 gb300/mxfp8/TP1 PP4 VPP1 EP32 mb2 batch 8192",
        -0.0135,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 26.02.01/qwen3-235b-a22b/256 gb200/mxfp8/TP1 PP8 VPP1 EP32 mb1 batch 8192",
        0.073,
        ("blackwell", "fp8", "hybridep", "inside", "none", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 26.02.01/qwen3-235b-a22b/256 b300/mxfp8/TP1 PP8 VPP4 EP8 mb1 batch 8192",
        1.0647,
        ("blackwell", "fp8", "nccl", "inside", "none", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 26.04.01/qwen3-235b-a22b/256 b200/mxfp8/TP1 PP8 VPP1 EP8 mb1 batch 8192",
        0.3766,
        ("blackwell", "fp8", "nccl", "inside", "none", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 26.04.01/qwen3-235b-a22b/256 h100/fp8/TP2 PP8 VPP4 EP32 mb1 batch 8192",
        -0.0989,
        ("hopper", "fp8", "nccl", "between", "merged", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 26.04.01/gpt-oss-120b/64 b300/bf16/TP1 PP1 VPP1 EP8 mb4 batch 1280",
        0.5628,
        ("blackwell", "bf16", "hybridep", "inside", "none", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.04.01/gpt-oss-120b/64 b200/bf16/TP1 PP1 VPP1 EP8 mb4 batch 1280",
        0.492,
        ("blackwell", "bf16", "nccl", "inside", "none", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.04.01/qwen3-30b-a3b/8 b200/mxfp8/TP1 PP1 VPP1 EP8 mb4 batch 512",
        0.2805,
        ("blackwell", "fp8", "hybridep", "inside", "none", True, False, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "megatron-bridge 26.06/kimi-k2/256 gb300/mxfp8/TP1 PP4 VPP4 EP64 mb2 batch 4096",
        0.0275,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "kimi-k2", "mla", 1026, 256),
    ),
    (
        "megatron-bridge 26.04.01/deepseek-v3/256 gb200/mxfp8/TP1 PP4 VPP4 EP64 mb1 batch 4096",
        0.031,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 26.06/qwen3-30b-a3b/16 h100/fp8/TP1 PP1 VPP1 EP16 mb1 batch 1024",
        0.4737,
        ("hopper", "fp8", "hybridep", "between", "none", True, False, "qwen3-30b-a3b", "gqa", 31, 16),
    ),
    (
        "megatron-bridge 26.04.01/qwen3-235b-a22b/256 gb300/mxfp8/TP1 PP4 VPP12 EP32 mb2 batch 8192",
        -0.0269,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 26.04.01/qwen3-235b-a22b/256 gb200/mxfp8/TP1 PP8 VPP3 EP32 mb1 batch 8192",
        0.0824,
        ("blackwell", "fp8", "hybridep", "inside", "none", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 26.04.01/qwen3-235b-a22b/256 b300/mxfp8/TP1 PP8 VPP1 EP8 mb2 batch 8192",
        0.0871,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 26.06/deepseek-v3/256 b300/mxfp8/TP1 PP8 VPP1 EP8 mb2 batch 4096",
        0.1397,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 26.04.01/deepseek-v3/256 b200/mxfp8/TP1 PP8 VPP2 EP32 mb1 batch 4096",
        -0.0031,
        ("blackwell", "fp8", "deepep", "between", "merged", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 26.04.01/gpt-oss-120b/64 gb200/bf16/TP1 PP1 VPP1 EP64 mb4 batch 1280",
        0.5446,
        ("blackwell", "bf16", "nccl", "inside", "merged", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.08/deepseek-v3/256 gb300/mxfp8/TP1 PP2 VPP8 EP32 mb1 batch 4096",
        -0.0854,
        ("blackwell", "fp8", "hybridep", "inside", "merged", True, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 26.06/deepseek-v3/256 gb300/mxfp8/TP1 PP2 VPP8 EP32 mb1 batch 15360",
        -0.0858,
        ("blackwell", "fp8", "hybridep", "inside", "merged", True, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 26.08/deepseek-v3/256 gb200/mxfp8/TP1 PP4 VPP4 EP64 mb1 batch 4096",
        0.0482,
        ("blackwell", "fp8", "hybridep", "inside", "merged", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-bridge 26.08/gpt-oss-120b/64 gb300/mxfp8/TP1 PP1 VPP1 EP16 mb4 batch 1280",
        0.3316,
        ("blackwell", "fp8", "hybridep", "inside", "merged", True, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.08/gpt-oss-120b/64 gb200/mxfp8/TP1 PP1 VPP1 EP64 mb4 batch 1280",
        0.5276,
        ("blackwell", "fp8", "hybridep", "inside", "merged", True, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.06/gpt-oss-120b/64 b300/mxfp8/TP1 PP1 VPP1 EP8 mb4 batch 1280",
        0.5025,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "megatron-bridge 26.08/qwen3-30b-a3b/8 gb300/mxfp8/TP1 PP1 VPP1 EP8 mb8 batch 512",
        -0.1216,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "megatron-bridge 26.08/qwen3-30b-a3b/8 gb200/mxfp8/TP1 PP1 VPP1 EP8 mb4 batch 512",
        -0.0528,
        ("blackwell", "fp8", "hybridep", "inside", "none", True, False, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "megatron-bridge 26.06/qwen3-30b-a3b/8 b300/mxfp8/TP1 PP1 VPP1 EP8 mb8 batch 512",
        -0.0549,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "megatron-bridge 26.08/qwen3-235b-a22b/256 gb300/mxfp8/TP1 PP4 VPP12 EP32 mb2 batch 8192",
        0.0557,
        ("blackwell", "fp8", "hybridep", "inside", "merged", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "megatron-bridge 26.08/qwen3-235b-a22b/256 gb200/mxfp8/TP1 PP8 VPP3 EP32 mb1 batch 8192",
        0.1004,
        ("blackwell", "fp8", "hybridep", "inside", "merged", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/TP2 EP32 PP8 VPP4",
        0.0653,
        ("hopper", "bf16", "deepep", "between", "none", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/TP2 EP32 PP8 VPP4/1f1b",
        0.2971,
        ("hopper", "bf16", "deepep", "between", "merged", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/FSDP TP2 EP8 mb4",
        -0.1187,
        ("hopper", "bf16", "deepep", "inside", "none", False, True, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/TP2 EP8 PP32 VPP3",
        0.3599,
        ("hopper", "bf16", "nccl", "inside", "none", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/TP4 EP8 PP8 VPP4",
        0.6799,
        ("hopper", "bf16", "deepep", "inside", "none", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/16K TP4 CP1 EP8 PP8 VPP4/forced",
        0.0656,
        ("hopper", "bf16", "deepep", "inside", "none", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/32K TP4 CP2 EP8 PP8 VPP4/forced",
        0.0145,
        ("hopper", "bf16", "deepep", "inside", "none", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/64K TP4 CP4 EP8 PP8 VPP4/forced",
        -0.0268,
        ("hopper", "bf16", "deepep", "inside", "none", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/128K TP4 CP8 EP8 PP8 VPP4/forced",
        -0.0455,
        ("hopper", "bf16", "deepep", "inside", "none", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/TP2 EP32 PP8 VPP4/1f1b, 2026",
        0.1194,
        ("hopper", "bf16", "deepep", "between", "merged", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 gb200/bf16 PP8 EP8",
        0.0553,
        ("blackwell", "bf16", "hybridep", "inside", "none", True, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/256 gb200/mxfp8 PP4 VPP6 EP64 mb3",
        0.2465,
        ("blackwell", "fp8", "hybridep", "inside", "merged", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/qwen3-235b/128 gb200/mxfp8 128K TP4 CP4 PP4 VPP12 EP32",
        -0.1732,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "qwen3-235b-a22b", "gqa", 235, 128),
    ),
    (
        "modelzoo/qwen3-235b/64 gb300/mxfp8 EP64",
        0.3483,
        ("blackwell", "fp8", "hybridep", "inside", "merged", True, False, "qwen3-235b-a22b", "gqa", 235, 64),
    ),
    (
        "modelzoo/qwen3-235b/256 gb300/mxfp8 PP4 EP32 mb2",
        -0.0113,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "qwen3-235b-a22b", "gqa", 235, 256),
    ),
    (
        "modelzoo/mixtral-8x22b/128 h100/bf16 forced",
        0.0425,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 128),
    ),
    (
        "modelzoo/mixtral-8x22b/128 h100/fp8 blockwise forced",
        0.0826,
        ("hopper", "fp8", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 128),
    ),
    (
        "modelzoo/mixtral-8x22b/128 h100/bf16 token drop",
        0.0358,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 128),
    ),
    (
        "gb200 guide/deepseek-v3/nccl, baseline",
        0.9961,
        ("blackwell", "fp8", "nccl", "inside", "none", False, False, "deepseek-v3", "mla", 671, 256),
    ),
    (
        "gb200 guide/deepseek-v3/deepep, graphs",
        0.1494,
        ("blackwell", "fp8", "deepep", "inside", "none", False, False, "deepseek-v3", "mla", 671, 256),
    ),
    (
        "gb200 guide/deepseek-v3/hybridep",
        0.124,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 671, 256),
    ),
    (
        "megatron-core report/deepseek-v3/1024 h100",
        0.0505,
        ("hopper", "fp8", "deepep", "between", "merged", False, False, "deepseek-v3", "mla", 683, 1024),
    ),
    (
        "megatron-core report/deepseek-v3/256 gb200",
        0.1001,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 683, 256),
    ),
    (
        "megatron-core report/deepseek-v3/gb300",
        -0.0425,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, False, "deepseek-v3", "mla", 683, 128),
    ),
    (
        "automodel/deepseek-v3/1024 h100",
        0.0806,
        ("hopper", "bf16", "deepep", "between", "none", False, False, "deepseek-v3", "mla", 671, 1024),
    ),
    (
        "automodel/deepseek-v3/256 h100",
        -0.0832,
        ("hopper", "bf16", "deepep", "between", "none", False, False, "deepseek-v3", "mla", 671, 256),
    ),
    (
        "automodel/kimi-k2/256 h100",
        0.0809,
        ("hopper", "bf16", "deepep", "between", "none", False, False, "kimi-k2", "mla", 1026, 256),
    ),
    (
        "automodel/qwen3-30b/8 h100",
        -0.0532,
        ("hopper", "bf16", "deepep", "inside", "none", False, True, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "automodel/gpt-oss-20b/8 h100",
        0.2445,
        ("hopper", "bf16", "deepep", "inside", "none", False, True, "gpt-oss-20b", "windows", 21, 8),
    ),
    (
        "automodel/gpt-oss-120b/64 h100",
        -0.097,
        ("hopper", "bf16", "deepep", "between", "none", False, True, "gpt-oss-120b", "windows", 117, 64),
    ),
    (
        "automodel/qwen3-30b/8 h100/deepep, 2026",
        -0.0732,
        ("hopper", "bf16", "deepep", "inside", "none", False, True, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "automodel/qwen3-30b/16 h100/deepep, 2026",
        -0.1567,
        ("hopper", "bf16", "deepep", "between", "none", False, True, "qwen3-30b-a3b", "gqa", 31, 16),
    ),
    (
        "automodel/qwen3-30b/8 h100/hybridep, 2026",
        -0.1498,
        ("hopper", "bf16", "hybridep", "inside", "none", False, True, "qwen3-30b-a3b", "gqa", 31, 8),
    ),
    (
        "automodel/qwen3-30b/16 h100/hybridep, 2026",
        -0.2227,
        ("hopper", "bf16", "hybridep", "between", "none", False, True, "qwen3-30b-a3b", "gqa", 31, 16),
    ),
    (
        "deepseek-v3 report/2048 h800",
        0.0236,
        ("hopper", "fp8", "deepep", "between", "merged", False, False, "deepseek-v3", "mla", 683, 2048),
    ),
    (
        "megascale/internal-352b/240 h800/Megatron-LM",
        0.3051,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "internal-352b", "gqa", 352, 240),
    ),
    (
        "megascale/internal-352b/240 h800/MegaScale-MoE",
        0.0507,
        ("hopper", "bf16", "chunks", "inside", "chunks", False, False, "internal-352b", "gqa", 352, 240),
    ),
    (
        "megascale/internal-352b/480 h800/Megatron-LM",
        0.2222,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "internal-352b", "gqa", 352, 480),
    ),
    (
        "megascale/internal-352b/480 h800/MegaScale-MoE",
        0.0974,
        ("hopper", "bf16", "chunks", "inside", "chunks", False, False, "internal-352b", "gqa", 352, 480),
    ),
    (
        "megascale/internal-352b/720 h800/Megatron-LM",
        0.23,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "internal-352b", "gqa", 352, 720),
    ),
    (
        "megascale/internal-352b/720 h800/MegaScale-MoE",
        0.0602,
        ("hopper", "bf16", "chunks", "inside", "chunks", False, False, "internal-352b", "gqa", 352, 720),
    ),
    (
        "megascale/internal-352b/960 h800/Megatron-LM",
        0.243,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "internal-352b", "gqa", 352, 960),
    ),
    (
        "megascale/internal-352b/960 h800/MegaScale-MoE",
        0.0396,
        ("hopper", "bf16", "chunks", "inside", "chunks", False, False, "internal-352b", "gqa", 352, 960),
    ),
    (
        "megascale/internal-352b/1440 h800/Megatron-LM",
        0.2596,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "internal-352b", "gqa", 352, 1440),
    ),
    (
        "megascale/internal-352b/1440 h800/MegaScale-MoE",
        -0.0138,
        ("hopper", "bf16", "chunks", "inside", "chunks", False, False, "internal-352b", "gqa", 352, 1440),
    ),
    (
        "MoE Parallel Folding, table 3 / mixtral-8x22b / TP+EP+DP / 128",
        -0.0051,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 3 / mixtral-8x22b / folded / 128",
        -0.002,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 3 / qwen2-57b-a14b / TP+EP+DP / 64",
        -0.0255,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 64),
    ),
    (
        "MoE Parallel Folding, table 3 / qwen2-57b-a14b / folded / 64",
        -0.0307,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 64),
    ),
    (
        "MoE Parallel Folding, table 3 / mixtral-8x22b-g8t8 / TP+EP+DP / 128",
        -0.0091,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b-g8t8", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 3 / mixtral-8x22b-g8t8 / folded / 128",
        -0.0994,
        ("hopper", "bf16", "nccl", "inside", "none", True, False, "mixtral-8x22b-g8t8", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 3 / llama3-8x70b / folded / 256",
        -0.0083,
        ("hopper", "bf16", "nccl", "inside", "none", True, False, "llama3-8x70b", "gqa", 465, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / MCore / 128",
        -0.0177,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / MCore / 256",
        -0.0064,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / MCore / 512",
        0.0135,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / MCore / 1024",
        0.0224,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / folded / 128",
        -0.0107,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / folded / 256",
        0.0005,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / folded / 512",
        0.0018,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / folded / 1024",
        0.0211,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / folded / 256",
        -0.0265,
        ("hopper", "bf16", "nccl", "inside", "none", True, False, "llama3-8x70b", "gqa", 465, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / folded / 1024",
        -0.0112,
        ("hopper", "bf16", "nccl", "inside", "none", True, False, "llama3-8x70b", "gqa", 465, 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / TP+EP+DP / 128",
        -0.0861,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / TP+EP+DP / 256",
        -0.0607,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b", "gqa", 141, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / TP+EP+DP / 512",
        0.0089,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b", "gqa", 141, 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / TP+EP+DP / 1024",
        -0.0208,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b", "gqa", 141, 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / MCore / 64",
        -0.0015,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 64),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / MCore / 128",
        -0.0055,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 128),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / MCore / 256",
        0.0097,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / MCore / 512",
        0.0424,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 512),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / MCore / 1024",
        0.0606,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / folded / 64",
        -0.0284,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 64),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / folded / 128",
        -0.0334,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 128),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / folded / 256",
        -0.0127,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / folded / 512",
        -0.0115,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 512),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / folded / 1024",
        0.0063,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / TP+EP+DP / 64",
        0.0271,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 64),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / TP+EP+DP / 128",
        0.0888,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 128),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / TP+EP+DP / 256",
        0.1248,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / TP+EP+DP / 512",
        0.0838,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 512),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / TP+EP+DP / 1024",
        0.0986,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "qwen2-57b-a14b", "gqa", 57, 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / MCore / 128",
        -0.1066,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b-g8t8", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / MCore / 256",
        -0.0506,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b-g8t8", "gqa", 141, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / MCore / 512",
        0.0459,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b-g8t8", "gqa", 141, 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / MCore / 1024",
        0.2138,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b-g8t8", "gqa", 141, 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / folded / 128",
        -0.1108,
        ("hopper", "bf16", "nccl", "inside", "none", True, False, "mixtral-8x22b-g8t8", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / folded / 256",
        -0.0993,
        ("hopper", "bf16", "nccl", "inside", "none", True, False, "mixtral-8x22b-g8t8", "gqa", 141, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / folded / 512",
        -0.0324,
        ("hopper", "bf16", "nccl", "inside", "none", True, False, "mixtral-8x22b-g8t8", "gqa", 141, 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / folded / 1024",
        -0.0277,
        ("hopper", "bf16", "nccl", "inside", "none", True, False, "mixtral-8x22b-g8t8", "gqa", 141, 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / TP+EP+DP / 128",
        0.0055,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b-g8t8", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / TP+EP+DP / 256",
        0.0163,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b-g8t8", "gqa", 141, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / TP+EP+DP / 512",
        0.0142,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b-g8t8", "gqa", 141, 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / TP+EP+DP / 1024",
        0.06,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b-g8t8", "gqa", 141, 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / MCore / 256",
        -0.0168,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "llama3-8x70b", "gqa", 465, 256),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / MCore / 512",
        -0.0084,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "llama3-8x70b", "gqa", 465, 512),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / MCore / 1024",
        -0.0108,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "llama3-8x70b", "gqa", 465, 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / folded / 512",
        -0.0158,
        ("hopper", "bf16", "nccl", "inside", "none", True, False, "llama3-8x70b", "gqa", 465, 512),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / MCore / 128 / 16K",
        -0.0535,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / MCore / 256 / 32K",
        -0.039,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b", "gqa", 141, 256),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / MCore / 512 / 64K",
        -0.0628,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b", "gqa", 141, 512),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / MCore / 1024 / 128K",
        0.0057,
        ("hopper", "bf16", "nccl", "between", "none", False, False, "mixtral-8x22b", "gqa", 141, 1024),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / folded / 128 / 16K",
        0.0673,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 128),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / folded / 256 / 32K",
        0.063,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 256),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / folded / 512 / 64K",
        0.0338,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 512),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / folded / 1024 / 128K",
        -0.0135,
        ("hopper", "bf16", "nccl", "inside", "none", False, False, "mixtral-8x22b", "gqa", 141, 1024),
    ),
)
