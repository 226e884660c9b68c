"""The run report: why a job is slow, and who keeps it waiting. Built from what ringreduce in each rank has measured.

collect   what ranks have measured and what has happened, in bounded memory
analyse   who waits for whom in a step, and how late each rank is
causes    stragglers: which ranks, hosts and links, why, and what to do
document  report.json
page      report.json → report.html, by report.html.jinja
write     writes it, and the page, while the job runs
command   ringrun report
live      a table of what ranks do just now, for `ringrun top`
metrics   the same for Prometheus
"""
