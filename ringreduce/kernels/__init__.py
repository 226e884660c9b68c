"""What NumPy lacks, or does too slowly: 16-, 8- and 4-bit numbers, fingerprints; and the compiled module."""
