"""One algorithm per file, each over a `Transport`; none knows of tensors, names or frameworks.

| function             | messages a rank sends | elements a rank sends, of n | source                |
|----------------------|-----------------------|-----------------------------|-----------------------|
| shared.allreduce     | 0                     | 0                           | see shared.py         |
| hierarchical         | a ring's or halving's | 2 n (H - 1) / H a host      | hierarchical.py       |
| direct.allreduce     | 2 (P - 1)             | 2 n (P - 1) / P             | Thakur et al. 2005    |
| doubling.allreduce   | log2 P, rounded up    | n log2 P                    | Thakur et al. 2005    |
| halving.allreduce    | 2 log2 P, rounded up  | 2 n (P - 1) / P             | Träff 2024            |
| ring.scatter_reduce  | P - 1                 | n (P - 1) / P               | Patarasuk & Yuan 2009 |
| ring.allgather       | P - 1                 | n (P - 1) / P               | Patarasuk & Yuan 2009 |
| ring.allreduce       | 2 (P - 1)             | 2 n (P - 1) / P             | Patarasuk & Yuan 2009 |
| tree.broadcast       | at most log2 P        | at most n log2 P            | binomial tree         |
| bruck.allgather      | log2 P, rounded up    | n (P - 1)                   | Bruck et al. 1997     |
| pairwise.alltoall    | P - 1                 | n (P - 1) / P               | Thakur et al. 2005    |
| adasum.allreduce     | log2 P                | n log2 P                    | Maleki et al. 2021    |

A cost model (cost_model.py) chooses the all-reduce. The ring's messages are
counted per chunk; a chunk longer than a segment is cut into several. All are generators that yield what they wait for
(transport/base.py), so that an engine can run several at a time.
"""
