"""Random faults in small trainings: each has to end in time, leave whole checkpoints, and go on to the same bits."""
