"""``tf-ooo bench pipeline``: pipeline schedules against each other on worker processes."""
