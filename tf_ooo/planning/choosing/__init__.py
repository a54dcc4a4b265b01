"""Makes all schedules that a mode has for given costs, and chooses the best."""
