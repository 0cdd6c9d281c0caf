"""Published training runs and how far off their predictions were: what :mod:`commlayer.scheduler.mapping.validity` knows.

Written by `make published`. A row: its key in docs/published.md or docs/papers.md; predicted over published throughput, less
1; its kind, as the fields of :class:`commlayer.scheduler.mapping.validity.Kind`.
"""

ROWS: tuple[tuple[str, float, tuple[str, str, str, str, str, bool, str, int]], ...] = (
    (
        "megatron-bridge 25.09/deepseek-v3/256 gb200/fp8/TP1 PP4 VPP4 EP64 mb1 batch 2048 tokendrop",
        -0.72,
        ("blackwell", "fp8", "hybridep", "between", "none", False, "deepseek-v3", 256),
    ),
    (
        "megatron-bridge 25.11/deepseek-v3/256 gb200/bf16/TP1 PP4 VPP4 EP64 mb1 batch 4096 w/o MTP",
        -0.706,
        ("blackwell", "bf16", "hybridep", "between", "none", False, "deepseek-v3", 256),
    ),
    (
        "megatron-bridge 25.11/deepseek-v3/256 gb200/mxfp8/TP1 PP8 VPP4 EP32 mb1 batch 4096 w/o MTP",
        -0.7373,
        ("blackwell", "fp8", "hybridep", "between", "none", False, "deepseek-v3", 256),
    ),
    (
        "megatron-bridge 25.11/deepseek-v3/256 b200/mxfp8/TP1 PP16 VPP1 EP8 mb1 batch 2048 w/ MTP",
        0.594,
        ("blackwell", "fp8", "nccl", "inside", "none", False, "deepseek-v3", 256),
    ),
    (
        "megatron-bridge 25.11/qwen3-235b-a22b/64 b200/mxfp8/TP1 PP8 VPP2 EP8 mb1 batch 1024",
        0.8538,
        ("blackwell", "fp8", "nccl", "inside", "none", False, "qwen3-235b-a22b", 64),
    ),
    (
        "megatron-bridge 25.11/qwen3-235b-a22b/256 h100/fp8/TP2 PP8 VPP4 EP32 mb1 batch 2048",
        -0.2502,
        ("hopper", "fp8", "nccl", "between", "none", False, "qwen3-235b-a22b", 256),
    ),
    (
        "megatron-bridge 26.02.01/deepseek-v3/256 gb200/mxfp8/TP1 PP4 VPP4 EP64 mb1 batch 4096",
        -0.7571,
        ("blackwell", "fp8", "hybridep", "between", "none", False, "deepseek-v3", 256),
    ),
    (
        "megatron-bridge 26.04/deepseek-v3/256 b200/mxfp8/TP1 PP16 VPP1 EP8 mb1 batch 4096",
        0.3744,
        ("blackwell", "fp8", "hybridep", "inside", "none", False, "deepseek-v3", 256),
    ),
    (
        "megatron-bridge 26.02.01/qwen3-235b-a22b/256 gb200/mxfp8/TP1 PP8 VPP1 EP32 mb1 batch 8192",
        -0.7287,
        ("blackwell", "fp8", "hybridep", "between", "none", False, "qwen3-235b-a22b", 256),
    ),
    (
        "megatron-bridge 26.04.01/qwen3-235b-a22b/256 b200/mxfp8/TP1 PP8 VPP1 EP8 mb1 batch 8192",
        0.5571,
        ("blackwell", "fp8", "nccl", "inside", "none", False, "qwen3-235b-a22b", 256),
    ),
    (
        "megatron-bridge 26.04.01/qwen3-235b-a22b/256 h100/fp8/TP2 PP8 VPP4 EP32 mb1 batch 8192",
        -0.3023,
        ("hopper", "fp8", "nccl", "between", "none", False, "qwen3-235b-a22b", 256),
    ),
    (
        "megatron-bridge 26.04.01/deepseek-v3/256 gb200/mxfp8/TP1 PP4 VPP4 EP64 mb1 batch 4096",
        -0.7705,
        ("blackwell", "fp8", "hybridep", "between", "none", False, "deepseek-v3", 256),
    ),
    (
        "megatron-bridge 26.08/qwen3-235b-a22b/256 gb200/mxfp8/TP1 PP8 VPP3 EP32 mb1 batch 8192",
        -0.7892,
        ("blackwell", "fp8", "hybridep", "between", "none", False, "qwen3-235b-a22b", 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/TP2 EP32 PP8 VPP4",
        -0.003,
        ("hopper", "bf16", "deepep", "between", "none", False, "qwen3-235b-a22b", 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/FSDP TP2 EP8 mb4",
        -0.1189,
        ("hopper", "bf16", "deepep", "inside", "none", True, "qwen3-235b-a22b", 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/TP4 EP8 PP8 VPP4",
        0.7645,
        ("hopper", "bf16", "deepep", "inside", "none", False, "qwen3-235b-a22b", 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/64K TP4 CP4 EP8 PP8 VPP4/forced",
        -0.05,
        ("hopper", "bf16", "deepep", "inside", "none", False, "qwen3-235b-a22b", 256),
    ),
    (
        "modelzoo/qwen3-235b/256 h100/TP2 EP32 PP8 VPP4/1f1b, 2026",
        -0.2313,
        ("hopper", "bf16", "deepep", "between", "none", False, "qwen3-235b-a22b", 256),
    ),
    (
        "modelzoo/qwen3-235b/256 gb200/mxfp8 PP4 VPP6 EP64 mb3",
        -0.8165,
        ("blackwell", "fp8", "hybridep", "between", "none", False, "qwen3-235b-a22b", 256),
    ),
    (
        "modelzoo/qwen3-235b/128 gb200/mxfp8 128K TP4 CP4 PP4 VPP12 EP32",
        -0.5543,
        ("blackwell", "fp8", "hybridep", "between", "none", False, "qwen3-235b-a22b", 128),
    ),
    (
        "gb200 guide/deepseek-v3/nccl, baseline",
        -0.4729,
        ("blackwell", "fp8", "nccl", "between", "none", False, "deepseek-v3", 256),
    ),
    (
        "gb200 guide/deepseek-v3/deepep, graphs",
        -0.686,
        ("blackwell", "fp8", "deepep", "between", "none", False, "deepseek-v3", 256),
    ),
    (
        "megatron-core report/deepseek-v3/1024 h100",
        -0.1261,
        ("hopper", "fp8", "deepep", "between", "none", False, "deepseek-v3", 1024),
    ),
    (
        "automodel/deepseek-v3/1024 h100",
        0.0835,
        ("hopper", "bf16", "deepep", "between", "none", False, "deepseek-v3", 1024),
    ),
    (
        "deepseek-v3 report/2048 h800",
        -0.2044,
        ("hopper", "fp8", "deepep", "between", "none", False, "deepseek-v3", 2048),
    ),
    (
        "megascale/internal-352b/240 h800/Megatron-LM",
        0.3599,
        ("hopper", "bf16", "nccl", "inside", "none", False, "internal-352b", 240),
    ),
    (
        "megascale/internal-352b/240 h800/MegaScale-MoE",
        0.1317,
        ("hopper", "bf16", "chunks", "inside", "chunks", False, "internal-352b", 240),
    ),
    (
        "megascale/internal-352b/480 h800/Megatron-LM",
        0.2729,
        ("hopper", "bf16", "nccl", "inside", "none", False, "internal-352b", 480),
    ),
    (
        "megascale/internal-352b/480 h800/MegaScale-MoE",
        0.1811,
        ("hopper", "bf16", "chunks", "inside", "chunks", False, "internal-352b", 480),
    ),
    (
        "megascale/internal-352b/720 h800/Megatron-LM",
        0.2806,
        ("hopper", "bf16", "nccl", "inside", "none", False, "internal-352b", 720),
    ),
    (
        "megascale/internal-352b/720 h800/MegaScale-MoE",
        0.1402,
        ("hopper", "bf16", "chunks", "inside", "chunks", False, "internal-352b", 720),
    ),
    (
        "megascale/internal-352b/960 h800/Megatron-LM",
        0.2937,
        ("hopper", "bf16", "nccl", "inside", "none", False, "internal-352b", 960),
    ),
    (
        "megascale/internal-352b/960 h800/MegaScale-MoE",
        0.1174,
        ("hopper", "bf16", "chunks", "inside", "chunks", False, "internal-352b", 960),
    ),
    (
        "megascale/internal-352b/1440 h800/Megatron-LM",
        0.3102,
        ("hopper", "bf16", "nccl", "inside", "none", False, "internal-352b", 1440),
    ),
    (
        "megascale/internal-352b/1440 h800/MegaScale-MoE",
        0.059,
        ("hopper", "bf16", "chunks", "inside", "chunks", False, "internal-352b", 1440),
    ),
    (
        "MoE Parallel Folding, table 3 / mixtral-8x22b / TP+EP+DP / 128",
        0.0024,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b", 128),
    ),
    (
        "MoE Parallel Folding, table 3 / mixtral-8x22b / folded / 128",
        -0.0054,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 128),
    ),
    (
        "MoE Parallel Folding, table 3 / qwen2-57b-a14b / TP+EP+DP / 64",
        -0.0186,
        ("hopper", "bf16", "nccl", "between", "none", False, "qwen2-57b-a14b", 64),
    ),
    (
        "MoE Parallel Folding, table 3 / qwen2-57b-a14b / folded / 64",
        -0.0256,
        ("hopper", "bf16", "nccl", "inside", "none", False, "qwen2-57b-a14b", 64),
    ),
    (
        "MoE Parallel Folding, table 3 / mixtral-8x22b-g8t8 / TP+EP+DP / 128",
        0.0126,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b-g8t8", 128),
    ),
    (
        "MoE Parallel Folding, table 3 / mixtral-8x22b-g8t8 / folded / 128",
        -0.0812,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b-g8t8", 128),
    ),
    (
        "MoE Parallel Folding, table 3 / llama3-8x70b / folded / 256",
        0.0207,
        ("hopper", "bf16", "nccl", "inside", "none", False, "llama3-8x70b", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / MCore / 128",
        -0.0208,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / MCore / 256",
        -0.0076,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / MCore / 512",
        0.0158,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / MCore / 1024",
        0.0313,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / folded / 128",
        -0.0173,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / folded / 256",
        -0.0042,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / folded / 512",
        0.0009,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / folded / 1024",
        0.0272,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / folded / 256",
        -0.0003,
        ("hopper", "bf16", "nccl", "inside", "none", False, "llama3-8x70b", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / folded / 1024",
        0.0196,
        ("hopper", "bf16", "nccl", "inside", "none", False, "llama3-8x70b", 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / TP+EP+DP / 128",
        -0.0858,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b", 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / TP+EP+DP / 256",
        -0.0599,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / TP+EP+DP / 512",
        0.0095,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b", 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b / TP+EP+DP / 1024",
        -0.018,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b", 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / MCore / 64",
        -0.0044,
        ("hopper", "bf16", "nccl", "inside", "none", False, "qwen2-57b-a14b", 64),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / MCore / 128",
        -0.0066,
        ("hopper", "bf16", "nccl", "inside", "none", False, "qwen2-57b-a14b", 128),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / MCore / 256",
        0.012,
        ("hopper", "bf16", "nccl", "inside", "none", False, "qwen2-57b-a14b", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / MCore / 512",
        0.0516,
        ("hopper", "bf16", "nccl", "inside", "none", False, "qwen2-57b-a14b", 512),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / MCore / 1024",
        0.0828,
        ("hopper", "bf16", "nccl", "inside", "none", False, "qwen2-57b-a14b", 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / folded / 64",
        -0.0265,
        ("hopper", "bf16", "nccl", "inside", "none", False, "qwen2-57b-a14b", 64),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / folded / 128",
        -0.0296,
        ("hopper", "bf16", "nccl", "inside", "none", False, "qwen2-57b-a14b", 128),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / folded / 256",
        -0.0052,
        ("hopper", "bf16", "nccl", "inside", "none", False, "qwen2-57b-a14b", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / folded / 512",
        0.0032,
        ("hopper", "bf16", "nccl", "inside", "none", False, "qwen2-57b-a14b", 512),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / folded / 1024",
        0.0344,
        ("hopper", "bf16", "nccl", "inside", "none", False, "qwen2-57b-a14b", 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / TP+EP+DP / 64",
        0.0341,
        ("hopper", "bf16", "nccl", "between", "none", False, "qwen2-57b-a14b", 64),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / TP+EP+DP / 128",
        0.0963,
        ("hopper", "bf16", "nccl", "between", "none", False, "qwen2-57b-a14b", 128),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / TP+EP+DP / 256",
        0.1324,
        ("hopper", "bf16", "nccl", "between", "none", False, "qwen2-57b-a14b", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / TP+EP+DP / 512",
        0.0901,
        ("hopper", "bf16", "nccl", "between", "none", False, "qwen2-57b-a14b", 512),
    ),
    (
        "MoE Parallel Folding, table 4 / qwen2-57b-a14b / TP+EP+DP / 1024",
        0.1039,
        ("hopper", "bf16", "nccl", "between", "none", False, "qwen2-57b-a14b", 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / MCore / 128",
        -0.1069,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b-g8t8", 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / MCore / 256",
        -0.0503,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b-g8t8", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / MCore / 512",
        0.0475,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b-g8t8", 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / MCore / 1024",
        0.2184,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b-g8t8", 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / folded / 128",
        -0.0952,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b-g8t8", 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / folded / 256",
        -0.082,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b-g8t8", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / folded / 512",
        -0.0107,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b-g8t8", 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / folded / 1024",
        0.0,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b-g8t8", 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / TP+EP+DP / 128",
        0.0268,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b-g8t8", 128),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / TP+EP+DP / 256",
        0.0382,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b-g8t8", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / TP+EP+DP / 512",
        0.0369,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b-g8t8", 512),
    ),
    (
        "MoE Parallel Folding, table 4 / mixtral-8x22b-g8t8 / TP+EP+DP / 1024",
        0.0853,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b-g8t8", 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / MCore / 256",
        -0.0172,
        ("hopper", "bf16", "nccl", "between", "none", False, "llama3-8x70b", 256),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / MCore / 512",
        -0.0078,
        ("hopper", "bf16", "nccl", "between", "none", False, "llama3-8x70b", 512),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / MCore / 1024",
        -0.0082,
        ("hopper", "bf16", "nccl", "between", "none", False, "llama3-8x70b", 1024),
    ),
    (
        "MoE Parallel Folding, table 4 / llama3-8x70b / folded / 512",
        0.0122,
        ("hopper", "bf16", "nccl", "inside", "none", False, "llama3-8x70b", 512),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / MCore / 128 / 16K",
        -0.065,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b", 128),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / MCore / 256 / 32K",
        -0.0525,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b", 256),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / MCore / 512 / 64K",
        -0.0829,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b", 512),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / MCore / 1024 / 128K",
        -0.0385,
        ("hopper", "bf16", "nccl", "between", "none", False, "mixtral-8x22b", 1024),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / folded / 128 / 16K",
        0.049,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 128),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / folded / 256 / 32K",
        0.0436,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 256),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / folded / 512 / 64K",
        -0.0025,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 512),
    ),
    (
        "MoE Parallel Folding, table 5 / mixtral-8x22b / folded / 1024 / 128K",
        -0.0622,
        ("hopper", "bf16", "nccl", "inside", "none", False, "mixtral-8x22b", 1024),
    ),
)
