"""What `horovod.tensorflow.data` has: tf.data's service, run by a job of its own, for a job that trains.

compute_service  how the two find each other, and what each of their ranks calls
compute_worker   a program for the ranks that prepare data
"""
