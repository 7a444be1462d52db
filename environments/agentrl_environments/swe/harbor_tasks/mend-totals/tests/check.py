import subprocess
import sys
import tempfile

# the programme runs in a process of its own: only what it prints is judged
with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    file.write("Mia,4\n\nAda,0.10\nMia,0.25\nAda,0.20\n")
    file.flush()
    done = subprocess.run([sys.executable, "/app/totals.py", file.name], capture_output=True, text=True, check=True)

assert done.stdout == "Ada 0.30\nMia 4.25\n", done.stdout
