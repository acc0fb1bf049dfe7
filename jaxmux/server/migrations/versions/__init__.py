"""One file for each version of a server's tables, in order."""
