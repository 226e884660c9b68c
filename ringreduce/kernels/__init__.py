"""What NumPy lacks, or does too slowly: 16-bit floats, copies from other cores' caches; and the compiled module."""
