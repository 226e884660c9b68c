"""What watches a job: stalls, the timeline, the launcher's questions, uncaught exceptions."""
