"""The arrays of all tasks: slots, train states, updates, and copies on the host."""
