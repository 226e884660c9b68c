"""What NumPy lacks, or does too slowly: 16-bit floats; and the compiled module."""
