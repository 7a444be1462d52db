#!/bin/sh
python3 - <<'END'
import collections
import json
import re

words = re.findall(r"[a-z']+", open("/app/poem.txt").read().lower())
json.dump(collections.Counter(words), open("/app/counts.json", "w"))
END
