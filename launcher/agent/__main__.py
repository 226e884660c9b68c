"""`python -m ringrun.agent`."""

from .agent import main

main()
