"""Runs the notebook NOTEBOOK, whose ranks are those of the Python RANKS; prints what its cells of code have put out."""

import json
import sys

import nbclient
import nbformat

notebook = nbformat.read(sys.argv[1], 4)
ranks = f"import functools, ringreduce\nringreduce.run = functools.partial(ringreduce.run, executable={sys.argv[2]!r})"
notebook.cells.insert(0, nbformat.v4.new_code_cell(ranks))  # the environment with IPython has no MPI
nbclient.NotebookClient(notebook, timeout=100).execute()
print(json.dumps([cell.outputs for cell in notebook.cells[1:] if cell.cell_type == "code"]))
