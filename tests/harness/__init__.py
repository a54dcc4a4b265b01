"""The frame of all random tests: a case is drawn from a number, runs in a child process, and is judged."""
