"""Who belongs to a run: decided by a state machine without clocks, sockets or threads, kept in a journal."""
