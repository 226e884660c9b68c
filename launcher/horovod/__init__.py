"""Holds the package `horovod` and its metadata; this folder is on the path of ranks of `ringrun --horovod`."""
