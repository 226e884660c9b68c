"""All that is about GPUs; its files stand at several heights of the layers (tests/unit/test_layers.py)."""
