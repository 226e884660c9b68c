"""ringrun scaling: is a script faster with more ranks, and if not, why?

command   the command line; runs the script with each number of ranks, in turns
measure   one run: starts ringrun, watches its steps, ends it
analyse   what the runs say: speed-up, what limits it, how many ranks pay off
page      the same as a page
"""
