"""Random faults in small trainings, which end in time, keep whole checkpoints, and go on to the same bits."""
