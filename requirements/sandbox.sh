#!/usr/bin/env bash
# Sees that bubblewrap is there, installs it where that needs no question, and otherwise says what goes without it.
set -eu
works() { bwrap --unshare-all --ro-bind / / true >/dev/null 2>&1; }
if works; then exit 0; fi
without="Without it the demo trains an agent that runs no code, and environments with a sandbox need another backend."
as_root=""
if [ "$(id -u)" != 0 ]; then
  if sudo -n true 2>/dev/null; then as_root="sudo -n"; else as_root="no"; fi
fi
for manager in apt-get dnf pacman apk zypper; do
  command -v "$manager" >/dev/null 2>&1 || continue
  case $manager in
    apt-get) line="apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap" ;;
    dnf) line="dnf install -y -q bubblewrap" ;;
    pacman) line="pacman -S --noconfirm bubblewrap" ;;
    apk) line="apk add --quiet bubblewrap" ;;
    zypper) line="zypper --non-interactive install bubblewrap" ;;
  esac
  if [ "$as_root" = no ]; then
    echo "The sandbox needs bubblewrap: sudo sh -c '$line'. $without" >&2
    exit 0
  fi
  echo "installing bubblewrap: $line"
  $as_root sh -c "$line" >/dev/null || true  # no network, say: the line below names what is missing
  break
done
if works; then exit 0; fi
echo "bubblewrap is missing, or cannot make a namespace here: install it and allow user namespaces. $without" >&2
