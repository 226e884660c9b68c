"""What interrupted.py imports."""

NAME = "up"
