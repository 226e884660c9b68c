"""`ringrun doctor`: what is wrong with the hosts and the links between them, and what to do about it.

command     the command line, and what is printed (its docstring is the manual); the job that measures, a rank a host
worker      what these ranks run
links       the worker's lines → what is slow, what to do, and the figures as text; pure
wire_cost   what a training step would take by each way to send less; pure
"""
