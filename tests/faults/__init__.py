"""Random faults in small trainings, which end in time, leave whole checkpoints, and go on to the same bits."""
