"""The steps from one version of the tables of a server to the next (Alembic)."""
