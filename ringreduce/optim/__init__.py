"""What the distributed optimizers of all frameworks share; no framework is named or imported here.

    adapter ── Exchange         how gradients are reduced: options, compress, submit, wait, decompress
            ── parameters       which name and which group a parameter has
            ── Reducer          when each gradient is reduced, for frameworks that compute them one by one
                 └─ Bucket      which are reduced together
                      └─ Gradient   one of them: its passes since the last step, its layout

An adapter whose framework hands over all gradients at once makes an `Exchange`, and passes them to `reduce`, or puts
`exchange.arguments` into its own functions.

An adapter whose framework computes gradients one by one derives from `Gradient` (where a gradient is kept, and what
stands for one that this rank did not compute) and from `Reducer` (what reports that one is ready). The `Reducer` calls
the `Gradient`, never the adapter.

Accumulation: `passes` backward passes of a gradient are summed, never divided, before it is reduced. The sum is where
the framework keeps gradients; here passes are only counted.
"""
