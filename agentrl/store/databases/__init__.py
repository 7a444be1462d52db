"""The databases below the store: SQLite in a file, PostgreSQL on a server."""
