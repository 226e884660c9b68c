"""Runs a notebook whose cells are on stdin, and stops cell 6 once its ranks are up; prints what the cells have."""

import json
import os
import re
import signal
import sys
import threading
import time

import nbclient
import nbformat

notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)])


def stop():  # as the stop button does
    while not (os.path.exists("up0") and os.path.exists("up1")):
        time.sleep(0.05)
    time.sleep(0.2)
    text = "".join(output["text"] for output in notebook.cells[6]["outputs"])
    os.kill(int(re.search("kernel ([0-9]+)", text)[1]), signal.SIGINT)


threading.Thread(target=stop, daemon=True).start()
nbclient.NotebookClient(notebook, timeout=100, allow_errors=True).execute()
print(json.dumps([cell["outputs"] for cell in notebook.cells]))
