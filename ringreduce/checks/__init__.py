"""Who broke it: what is looked at while a job trains, if it is asked for. Off by default.

setting       what `check=` asks for
switch        the function `check`, which switches checks on and off
"""
