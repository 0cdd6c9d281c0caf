"""Programs that put the layers together; run them with ``python -m``."""
