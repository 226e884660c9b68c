"""What the distributed optimizers of all frameworks share; no framework is named or imported here.

    adapter ── Exchange         how gradients are reduced: options, compress, submit, wait, decompress
            ── parameters       which name and which group a parameter has
            ── Reducer          when each gradient is reduced, for frameworks that compute them one by one
                 └─ GradientBucket   which are reduced together
                      └─ Gradient    one of them: its passes since the last step, its layout

An adapter whose framework hands over all gradients at once makes an `Exchange`, and passes them to `reduce`, or puts
`exchange.arguments` into its own functions.

An adapter whose framework computes gradients one by one derives from `Gradient` (where a gradient is kept, and what
stands for one that this rank did not compute) and from `Reducer` (what reports that one is ready). The `Reducer` calls
the `Gradient`, never the adapter.

A gradient's way through a step, and the fields of it and of its bucket that say where it is:

    none ──count──> adding up ──count──> computed ──begin──> in flight ──finish──> reduced
    seen 0          seen < passes        seen = passes       begun, parts          begun, seen 0

    step, zero_grad     any of these ──reset──> none; but zero_grad in flight is a BackwardError
    synchronize         none (as zeros) or adding up (as a short sum) ──begin──> in flight ──finish──> reduced
    backward again      reduced ──count──> adding up or computed, and reduced again; in flight: BackwardError

`begin` comes during backward, where the reducer trusts the script, else at the first access or at step().

A bucket of several, on which ranks agree after a step, begins when all its gradients are computed. Where a rank must
begin some of them alone it refuses: the bucket's allreduce is a MismatchError on every rank, each of which then
lets its gradients leave the bucket, and begins them by their own names. They stay alone until the world changes
or a step fails.

Accumulation: `passes` backward passes of a gradient are summed, never divided, before it is reduced. The sum is where
the framework keeps gradients; here passes are only counted.
"""
