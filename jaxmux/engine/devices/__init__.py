"""Work on the devices: compiled programs, the executors that call them, and programs for other
engine sizes that are compiled ahead."""
