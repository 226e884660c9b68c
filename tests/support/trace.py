"""Reads a timeline as strictly as the Trace Event Format is written, and more strictly than Perfetto does."""

import json
from collections import defaultdict

NEEDS = {"X": {"ts", "dur", "tid", "cat"}, "i": {"ts", "s", "tid"}, "C": {"ts", "args"}, "M": {"args"}}
NEEDS |= {kind: {"ts", "tid", "id", "cat", "bp"} for kind in "stf"}
ROUNDED_US = 0.0011


def read(path):
    """All events but metadata, each with its row as `tensor`; asserts that a reader can make sense of all of them."""
    with open(path, "rb", buffering=0) as file:
        records = json.loads(file.read(1 << 28))  # at once: between two reads the file may grow
    about, events = defaultdict(dict), []
    for record in records:
        assert {"name", "pid"} | NEEDS[record["ph"]] <= set(record), record
        if record["ph"] == "M":
            about[record["name"]][record["pid"], record.get("tid")] = next(iter(record["args"].values()))
        else:
            assert record["ts"] >= 0, record
            row = about["thread_name"].get((record["pid"], record.get("tid")))
            assert row or record["ph"] == "C" or record.get("s") == "g", f"of no row: {record}"
            events.append(record | {"tensor": row})
    assert about["start_time_since_epoch_in_micros"]
    names(about)
    for row, slices in by(events, "X", "pid", "tid").items():
        nest(slices, about["thread_name"][row])
    flows(events)
    for rank, values in by(events, "C", "pid").items():
        assert all(each["args"]["bytes"] >= 0 for each in values), f"less than nothing on rank {rank}"
    return events


def by(events, kinds, *keys):
    found = defaultdict(list)
    for each in events:
        if each["ph"] in kinds:
            found[tuple(each[key] for key in keys)].append(each)
    return found


def names(about):
    """Processes are sorted by rank; a row has a number of its own, and one place, the same on all ranks."""
    assert all(index == rank for (rank, _), index in about["process_sort_index"].items())
    rows = {(about["thread_name"][row], index) for row, index in about["thread_sort_index"].items()}
    assert len(rows) == len({name for name, _ in rows}) == len({index for _, index in rows}), rows
    assert set(about["thread_name"]) == set(about["thread_sort_index"])
    assert len({tid for _, tid in about["thread_name"]}) == len(about["thread_name"])


def nest(slices, row):
    ends = []
    for each in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
        assert each["dur"] >= 0, each
        end = each["ts"] + each["dur"]
        while ends and ends[-1] <= each["ts"] + ROUNDED_US:
            ends.pop()
        assert not ends or end <= ends[-1] + ROUNDED_US, f"{row}: {each} begins in another that ends before it"
        ends.append(end)


def flows(events):
    """Each has one start and one end, in order, and each of its points is in a span."""
    slices = {(each["pid"], each["tid"], each["ts"]) for each in events if each["ph"] == "X"}
    for points in by(events, "stf", "cat", "name", "id").values():
        kinds = "".join(each["ph"] for each in sorted(points, key=lambda each: each["ts"]))
        assert kinds in ("sf", "stf"), points
        assert {(each["pid"], each["tid"], each["ts"]) for each in points} <= slices, points
