"""A bench with one row."""

from common import Column, Report, parse, parser

columns = [Column("who", "  who", left=True), Column("time_us", "time", "us", form=".1f"), Column("wrong", "#wrong")]
report = Report("one", {"notes": ["bar: reached", "left out: b"]}, columns, True, "note")
report.add({"who": "  a", "time_us": 1.26, "wrong": None})
report.finish(parse(parser("", runs=1)))
