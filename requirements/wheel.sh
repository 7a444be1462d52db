#!/usr/bin/env bash
# Build the source archive and from it the wheel, and use the wheel from empty environments: without torch on every Python
# that we support and find here, as somebody has who writes environments, and with the extra `train`, as a newcomer has who
# types `agentrl demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
uv="$PWD/.venv/bin/uv"
python="$PWD/.venv/bin/python"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$uv" build --quiet --python "$python" --out-dir "$folder/dist"
"$uv" venv --quiet --python "$python" "$folder/venv"
"$uv" pip install --quiet --python "$folder/venv/bin/python" "$folder"/dist/agentrl_kit-*.whl
cd "$folder"
for heavy in torch transformers peft matplotlib; do
  if venv/bin/python -c "import $heavy" 2>/dev/null; then echo "the wheel brings $heavy with it"; exit 1; fi
done
venv/bin/agentrl --version
venv/bin/agentrl list environments | grep -q agentrl/CodeRepair-v0
venv/bin/agentrl show agentrl/Calculator-v0 >/dev/null
venv/bin/agentrl validate agentrl/Calculator-v0 --n 2
venv/bin/agentrl new env my_game >/dev/null
venv/bin/agentrl view --demo --bundle page >/dev/null  # its files and the recorded run are in the wheel
[ -s page/assets/app.js ] && [ -s page/data/run.json ]
venv/bin/python -c 'from agentrl.store import RunStore; RunStore.create("new.sqlite", "{}").close()'  # its tables, too
venv/bin/python -c 'import agentrl; agentrl.check_env("agentrl/Calculator-v0")'
venv/bin/python -c 'import gymnasium; gymnasium.make("agentrl:agentrl/Calculator-v0").reset(seed=1)'
printf 'model = "agentrl/tiny-coder"\n[env]\nid = "agentrl/Calculator-v0"\n' >run.toml
said=$(venv/bin/agentrl train run.toml 2>&1) && { echo "it trained without torch"; exit 1; }
# The command installs from this wheel file: it is on no index.
case "$said" in
  "agentrl: training needs torch, which is not installed: pip install '/"*"/agentrl_kit-"*".whl[train]'") ;;
  *) echo "$said"; exit 1 ;;
esac
[ ! -e runs ]
echo "the wheel works without torch"

# runnable NAME: a Python of that version, as a command or one of pyenv's that its shims do not start.
runnable() {
  local candidate
  for candidate in "python$1" "$HOME/.pyenv/versions/$1".*/bin/python; do
    if "$candidate" -c '' 2>/dev/null; then echo "$candidate"; return; fi
  done
}
for version in 3.12 3.13 3.14; do
  other=$(runnable "$version")
  if [ -z "$other" ]; then echo "Python $version: not on this machine"; continue; fi
  "$uv" venv --quiet --python "$other" "venv-$version"
  "$uv" pip install --quiet --python "venv-$version/bin/python" dist/*.whl
  "venv-$version/bin/agentrl" validate agentrl/Calculator-v0 --n 2 >/dev/null
  "venv-$version/bin/python" -c 'import agentrl; agentrl.check_env("agentrl/Calculator-v0")'
  echo "the wheel works with $("venv-$version/bin/python" --version)"
done

cd - >/dev/null
"$uv" venv --quiet --python "$python" "$folder/trains"
# The same source of torch as in the Makefile: a folder of wheels, or else PyTorch's index of CPU builds.
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
[ -n "$UV_FIND_LINKS" ] || export UV_TORCH_BACKEND=cpu
"$uv" pip install --quiet --python "$folder/trains/bin/python" --constraint requirements/runtime.txt \
  "$(echo "$folder"/dist/agentrl_kit-*.whl)[train]"
mkdir "$folder/empty"
cd "$folder/empty"
# Two steps and eight tasks: whether the whole demo learns is what `make demo` shows.
../trains/bin/agentrl demo --set train.steps=2 --set eval.every=0 \
  --set 'eval.sets=[{ name = "held_out", kwargs = { split = "held_out" }, n = 8 }]' | tail -n 24
[ -s runs/demo/curves.png ] && [ -s runs/demo/summary.json ]
echo "the wheel trains its demo in an empty environment"
