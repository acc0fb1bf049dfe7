"""What runs on the devices: compiled programs, the executors that call them, and engines' sizes
compiled ahead."""
