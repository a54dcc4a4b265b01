"""Draws pictures of timelines, each by a module that is imported when it is asked for; none knows costs or
graphs."""
