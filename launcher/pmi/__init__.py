"""MPI in processes that something else has started: torchrun, mp.spawn, Ray, Spark, Dask. There is no launcher of MPI.

MPICH asks its launcher over a socket who it is and where the others are: PMI-1, lines of text. Here one of the ranks
starts a small process that answers all of them, and each rank hands MPICH a socket to it. On one host that process
answers Open MPI, too: by Open MPI's own library for that, PMIx.

    one rank     client.start ── the server's process ── its address and a key, which the others get from whoever
                                                         started them: torch's store, a task's arguments
    every rank   client.join  ── a link: Joining …, Joined ── the server knows who is there, and on which host
                 MPI_Init     ── a socket for MPICH ── Answers: who is where, what ranks tell each other, barriers
                              ── PMIx's own for Open MPI ── the library
    afterwards                ── the same link: Begun; Leaving, or its end is the rank's, and the others hear Lost

The server is no thread of a rank, since mpi4py holds the GIL while MPI starts and ends. It outlives the rank that
started it, because the others need it until MPI ends. Source: MPICH's src/pmi/src, PMI-1's wire protocol.

server   the process
answers  what it answers MPICH
pmix     what answers Open MPI
client   a rank's part
"""
