"""What the ranks write, shown and kept.

streams     the descriptors, and the one thread that writes to them
display     ringrun's stdout and stderr, shared by all ranks
lines       bytes cut into lines; progress bars
prefix      [3] before a line, its colour, the time
fold        equal lines of several ranks shown once
files       --output-filename
"""
