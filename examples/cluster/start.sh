#!/usr/bin/env bash
# Begin a run, or go on with the one that is in its folder: what a batch system starts again and again.
#   start.sh RUN.toml FOLDER [--set section.key=value ...]
set -euo pipefail
file=$1 folder=$2
shift 2
if [ -e "$folder/store.address" ] || [ -e "$folder/store.sqlite" ]; then
  exec agentrl train --resume "$folder" --keep-alive
fi
exec agentrl train "$file" --out "$folder" --keep-alive "$@"
