"""What watches a job.

stall_report   which operations wait, and what ranks do instead, in words
recording      the timeline of a whole job, over all engines
reporting      sends to the launcher what steps wait for; sampling: its script's lines, processor time, memory
loaders        counts the examples that data loaders give
side_job       what may fail without the job, such as a recording
launcher_link  the launcher's questions, and reports to it
excepthook     uncaught exceptions, which end the job
"""
