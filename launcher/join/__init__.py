"""Nodes without ssh: `ringrun join` on every node makes one job of them.

command    the command line; whether this node is the head, which runs ringrun, or lends itself to it
platforms  which node this is, from the variables that its platform sets
key        what the nodes of a job know, and nobody else
node       a node that lends itself: runs what the head asks for
hub        on the head, a process beside ringrun that holds the nodes' connections
head       ringrun's end of the hub; OverJoin, the Reach of such a job
rsh        what an MPI's launcher, and ringrun, call in place of ssh
"""
