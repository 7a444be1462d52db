#!/bin/sh
cd /app/logs
for file in *.log; do
    sed "s/^/${file%.log} /" "$file"
done | sort -k 2 > /app/merged.log
