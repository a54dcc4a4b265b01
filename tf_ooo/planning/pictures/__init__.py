"""Pictures of timelines: a page, a trace file, a PNG, a grid for the terminal.

Each is a module of its own, imported when it is asked for; none of them knows costs or graphs.
"""
