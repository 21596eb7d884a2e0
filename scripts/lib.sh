# Shared by the scripts: sourced, not run.
# shellcheck shell=bash

say() { printf '\n== %s\n' "$*"; }

fail() {
  printf '%s\n' "$*" >&2
  exit 1
}

has() { command -v "$1" >/dev/null 2>&1; }

# use_go puts Go into PATH, also where its installer put it and no profile was read.
use_go() {
  if ! has go && [ -x /usr/local/go/bin/go ]; then
    PATH="$PATH:/usr/local/go/bin"
    export PATH
  fi
  has go || fail "Go is not here: install the version that go.mod names, or a newer one (brew install go, or the Go project's download)"
}

# cache_dir prints the folder for what is fetched once and kept. root's own cache lies in a home that other users may not
# enter, but PostgreSQL runs as another user then. internal/pgserver looks in the same places.
cache_dir() {
  if [ -n "${OUTFLOW_CACHE:-}" ]; then
    echo "$OUTFLOW_CACHE"
  elif [ "$(id -u)" = 0 ]; then
    echo /var/cache/outflow
  elif [ "$(uname -s)" = Darwin ]; then
    echo "$HOME/Library/Caches/outflow"
  else
    echo "${XDG_CACHE_HOME:-$HOME/.cache}/outflow"
  fi
}

# postgres_bins prints the folders with a PostgreSQL server, one a line: where internal/pgserver looks, but for the cache.
postgres_bins() {
  local bin named
  IFS=: read -ra named <<<"${OUTFLOW_PG_BIN:-}"
  for bin in ${named[@]+"${named[@]}"} /usr/lib/postgresql/*/bin /usr/pgsql-*/bin \
    /opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin /home/linuxbrew/.linuxbrew/opt/postgresql@*/bin \
    /Applications/Postgres.app/Contents/Versions/*/bin; do
    if [ -x "$bin/initdb" ] && [ -x "$bin/postgres" ]; then
      echo "$bin"
    fi
  done
  if has postgres && has initdb; then
    dirname "$(command -v postgres)"
  fi
}

# cached_bins prints the same of the cache that scripts/postgres fills.
cached_bins() {
  local bin
  for bin in "$(cache_dir)"/postgres/*/bin; do
    if [ -x "$bin/postgres" ]; then
      echo "$bin"
    fi
  done
}

# as_root runs a command as root.
as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  elif has sudo; then
    sudo "$@"
  else
    fail "this needs root, and sudo is not here: $*"
  fi
}

# apt_install installs packages of Debian or Ubuntu; the list of packages may be missing or old on a fresh machine.
apt_install() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" </dev/null >/dev/null 2>&1 && return
  as_root apt-get update -q </dev/null >/dev/null
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" </dev/null >/dev/null
}
