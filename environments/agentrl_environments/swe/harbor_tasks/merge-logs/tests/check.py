from pathlib import Path

EXPECTED = """\
db 2024-03-01T09:00:01 ready
web 2024-03-01T09:00:02 request /
db 2024-03-01T09:00:04 slow query
mail 2024-03-01T09:00:07 sent
web 2024-03-01T09:00:09 request /cart
"""

assert Path("/app/merged.log").read_text("utf-8") == EXPECTED
