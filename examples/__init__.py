"""A small MoE language model on any mapping, its parallel layers and pipelines, and a program that trains it."""
