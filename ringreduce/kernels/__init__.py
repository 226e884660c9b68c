"""What NumPy lacks, or does too slowly: 16-bit floats (half), and copies to and from other cores' caches (copying).

Modules named after a library are imported when that library is installed and one of their kernels is needed.
"""
