"""The watched folder of a server: tenants put specifications in, and read status files."""
