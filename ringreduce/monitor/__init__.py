"""What watches a job.

stalls         which ranks are missing, and what they do instead
timeline       the events of this rank, and the file of all ranks' events
recording      the timeline of a whole job, over all engines
steps          what a rank waits for in a training step
reporting      sends that to the launcher; sampling: its script's lines, processor time, memory
side_job       what may fail without the job, such as a recording
launcher_link  the launcher's questions, and reports to it
excepthook     uncaught exceptions, which end the job
"""
