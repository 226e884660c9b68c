"""`ringrun manifest`: the command line (manifest), and the MPIJob that it prints (mpijob)."""
