"""What tests share: how jobs are started and waited for, ranks as threads, references, stand-ins for GPUs."""
