"""Pictures of timelines, each a module that is imported when it is asked for; none knows costs or graphs."""
