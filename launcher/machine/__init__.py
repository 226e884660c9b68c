"""This host: its cores and GPUs (topology), and which of them each rank gets (placement)."""
