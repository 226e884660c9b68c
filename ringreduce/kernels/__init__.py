"""What NumPy does not do, or not fast enough: 16-bit floats (half), and memory that other cores have read (copying).

Modules named after a library are imported when that library is there and one of their kernels is needed.
"""
