"""How a job ended, in words: pure functions on records.

outcome     how each rank ended, and which of them is the cause
card        the report of the first failure
answers     what the other ranks waited for; stacks, equal ones grouped
traces      Python stacks, read
"""
