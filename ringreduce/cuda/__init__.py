"""GPU memory: CUDA's streams, events and memory, through CuPy. The lowest layer but for errors and types."""
