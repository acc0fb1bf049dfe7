"""The tables of tasks and of the server."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def _meter() -> list[sa.Column]:
    names = ("effective", "computed", "recomputed", "trained", "held_out")
    tokens = [sa.Column(f"{name}_tokens", sa.BigInteger, nullable=False) for name in names]
    return [*tokens, sa.Column("device_seconds", sa.Double, nullable=False)]


def upgrade() -> None:
    op.create_table(
        "tasks",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("key", sa.String, nullable=False, unique=True),
        sa.Column("name", sa.String, nullable=False, unique=True),
        sa.Column("specification", sa.JSON, nullable=False),
        sa.Column("origin", sa.JSON),
        sa.Column("arrival", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("priority", sa.BigInteger, nullable=False),
        sa.Column("passes", sa.BigInteger, nullable=False),
        sa.Column("steps", sa.BigInteger),
        sa.Column("extensions", sa.JSON, nullable=False),
        sa.Column("files", sa.JSON, nullable=False),
        sa.Column("fingerprints", sa.JSON, nullable=False),
        sa.Column("history", sa.JSON, nullable=False),
        sa.Column("warnings", sa.JSON, nullable=False),
        sa.Column("progress", sa.JSON),
        sa.Column("counted", sa.JSON, nullable=False),
        sa.Column("told", sa.Boolean, nullable=False),
        sa.Column("checkpoint", sa.BigInteger),
        *_meter(),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "server",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("rounds", sa.BigInteger, nullable=False),
        sa.Column("checkpoints", sa.BigInteger, nullable=False),
        sa.Column("events_bytes", sa.BigInteger, nullable=False),
        sa.Column("rounds_bytes", sa.BigInteger, nullable=False),
        *_meter(),
    )
