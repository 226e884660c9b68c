"""Everything about GPUs; its files belong to several layers (tests/unit/test_layers.py)."""
