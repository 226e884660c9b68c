"""A function on three hosts by ringreduce.run()."""

import socket

import ringreduce as rr


def function(x):
    rr.init()
    return socket.gethostname(), float(rr.allreduce(x * (rr.rank() + 1), op=rr.Sum))


results = rr.run(function, (1.0,), np=3, hosts="h0:1,h1:1,h2:1")
print(*(result[:2] for result in results))
