"""Models and clusters that users describe in files: a Hugging Face config.json, a cluster in JSON."""
