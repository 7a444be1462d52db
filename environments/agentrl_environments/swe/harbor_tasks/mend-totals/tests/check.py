from pathlib import Path

# the programme ran in the agent's box, on amounts that the agent had not seen: only what it printed came here
assert Path("/logs/artifacts/printed.txt").read_text("utf-8") == "Ada 0.30\nMia 4.25\n"
