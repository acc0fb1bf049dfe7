"""Runs the steps of `versions` on the connection that `server.database` passes (Alembic)."""

from alembic import context

from jaxmux.server.database import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
with context.begin_transaction():
    context.run_migrations()
