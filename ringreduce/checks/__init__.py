"""Which rank broke it: what is checked while a job trains, if it is asked for. Off by default, but for learning rates.

switch        the function `check`, which switches checks on and off
nan           which rank began with NaN or infinity, in which tensor and step, and what all ranks do then
agreement     which of the ranks' findings is the one to name
divergence    have all ranks the same parameters? blame: who has not, and why
learning_rates  have all ranks the same ones? On in every job. comparison: when ranks compare, for both
resum         does another algorithm give the same sums?
twice         are the bits of two runs of `ringrun --twice` the same?
"""
