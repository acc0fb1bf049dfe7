"""One task: its data, everything that is needed to train it, and its progress."""
