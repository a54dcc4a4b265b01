"""Defines tasks, schedules, and the one relation that says what each task waits for and keeps alive."""
