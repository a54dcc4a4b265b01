"""What a user is told: the report of a training, its page."""
