#!/usr/bin/env bash
# The built site ($1) asks nobody: no page, script or style of it loads anything over the network.
set -euo pipefail
pages=$(find "$1" -name '*.html' | wc -l)
[ "$pages" -gt 20 ] || { echo "$1 holds $pages pages: the site is not built"; exit 1; }
if grep -rnoE --include='*.html' '<(script|img|iframe|source)[^>]* src="?(https?:)?//[^" >]*|<link[^>]* rel="?(stylesheet|preconnect|icon|prefetch)[^>]* href="?(https?:)?//[^" >]*' "$1"; then
  echo "the site loads these from elsewhere"; exit 1
fi
if grep -rnoE --include='*.css' '(@import|url\()[ "'"'"']*(https?:)?//[^)"]*' "$1"; then echo "its styles load these from elsewhere"; exit 1; fi
echo "$1: $pages pages, nothing loaded from elsewhere"
