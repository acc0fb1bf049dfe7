"""The watched folder of a server: tenants put specifications there, and read status files."""
