"""One file a version of the tables of a server, in their order."""
