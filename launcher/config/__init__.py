"""What the user has set, and where: flags, a file, variables, defaults.

resolve     each value and its source; a flag for every setting of ringreduce
file        the YAML of --config-file
horovod     horovodrun's names for them
"""
