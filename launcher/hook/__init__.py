"""Holds sitecustomize.py, which the Python of a rank finds because agents put this folder on its PYTHONPATH."""
