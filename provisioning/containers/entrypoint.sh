#!/usr/bin/env bash
# server | relay | site: run the kit in /kit (or $KIT) in the foreground; anything else is a command of medsilo.
set -euo pipefail
kit="${KIT:-/kit}"
case "${1:-}" in
  server) file=fed_server.json ;;
  relay) file=fed_relay.json ;;
  site) file=fed_client.json ;;
  *) exec medsilo "$@" ;;
esac
if [[ ! -r "$kit/startup/$file" ]]; then
  echo "medsilo: $kit is no kit of a $1 that user $(id -u) can read: it has no startup/$file; mount one there" >&2
  exit 1
fi
if [[ ! -w "$kit" ]]; then
  echo "medsilo: user $(id -u) can't write to $kit: run with --user of its owner, or make it that user's" >&2
  exit 1
fi
exec "$kit/startup/sub_start.sh" --once
