"""Ranks in virtual time, for benches and tests of scale; what they run: bench/simulation.py.

cluster  the ranks, their clocks, and the messages between them
memory   what the ranks of a host share
wire     what the hosts share
"""
