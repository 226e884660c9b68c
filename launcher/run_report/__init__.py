"""The run report: why a job is slow, and who keeps it waiting. Built from what ringreduce in each rank has measured.

collect   what ranks have measured and what has happened, in bounded memory
page      report.json → report.html, by report.html.jinja
"""
