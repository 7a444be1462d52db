"""The run store in PostgreSQL. The only room that imports psycopg."""
