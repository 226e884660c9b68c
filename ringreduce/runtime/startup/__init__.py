"""What init() does before there is an engine: measuring, shared memory, the clocks of hosts."""
