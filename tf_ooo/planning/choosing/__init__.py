"""Makes all schedules that a mode has for given costs, and finds the best of them."""
