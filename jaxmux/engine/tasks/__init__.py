"""One task: its data, what is needed to train it, and how far it has come."""
