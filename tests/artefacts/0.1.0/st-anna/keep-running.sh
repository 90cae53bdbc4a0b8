#!/usr/bin/env bash
# Runs this kit in the foreground, and starts it again whenever it ends, until this script is ended, or the site is
# shut down from NVFlare's console or by startup/stop_fl.sh. It never gives up: after a start that lasted less than a
# minute it waits longer, five minutes at most.
cd "$(dirname "${BASH_SOURCE[0]}")" || exit 1
if ! python3 -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("nvflare") is None)'; then
  told="medsilo: $(command -v python3 || echo python3) has no nvflare; activate medsilo's environment first"
  if [[ ! -t 2 ]]; then { echo "$told" >/dev/tty; } 2>/dev/null; fi  # a person sees it, also with the output in a file
  echo "$told" >&2; exit 1
fi
trap 'kill "$child" 2>/dev/null; wait "$child"; exit 0' TERM INT
longest="${MEDSILO_LONGEST_WAIT:-300}" pause=5
while true; do
  began=$SECONDS
  rm -f shutdown.fl
  startup/sub_start.sh --once & child=$!
  while kill -0 "$child" 2>/dev/null && [[ ! -f shutdown.fl ]]; do sleep 1 & wait "$!"; done
  if [[ -f shutdown.fl ]]; then  # of the console, which ends the kit itself, or of stop_fl.sh, which leaves that to us
    for _ in 1 2 3 4 5; do kill -0 "$child" 2>/dev/null && sleep 1; done
    kill "$child" 2>/dev/null; wait "$child"
    echo "medsilo: shut down by the console or stop_fl.sh; start this script anew" >&2; exit 0
  fi
  wait "$child"; code=$?
  if (( SECONDS - began >= 60 )); then pause=5; fi
  if (( pause > longest )); then pause=$longest; fi
  echo "medsilo: $(date -u +%FT%TZ) ended with code $code after $((SECONDS - began)) s; starts again in $pause s" >&2
  sleep "$pause" & child=$!
  wait "$child"
  pause=$((pause * 2))
done
