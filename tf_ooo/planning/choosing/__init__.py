"""All schedules that a mode has for given costs, and the best of them."""
