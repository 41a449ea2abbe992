"""The database over time, by Alembic: `controller.store` runs it when the controller starts."""
