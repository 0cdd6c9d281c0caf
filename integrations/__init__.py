"""Who calls it: MoE layers and trainers. Nothing is here yet."""
