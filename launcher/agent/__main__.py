"""`python -m ringrun.agent COMMAND …`."""

from .agent import main

main()
