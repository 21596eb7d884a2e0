# Shared by the scripts: sourced, not run.
# shellcheck shell=bash

say() { printf '\n== %s\n' "$*"; }

fail() {
  printf '%s\n' "$*" >&2
  exit 1
}

has() { command -v "$1" >/dev/null 2>&1; }

# What the tests may need beside Go: the names of internal/lab/tier.
# shellcheck disable=SC2034 # the scripts read it
everything=postgres,pg14,pg15,pg16,pg17,pg18,psql,pg_resetwal,go,linux,browser,yjs,npm,python,prometheus,race,shellcheck

# The Go modules beside the root whose tests are among all tests. packaging, which takes minutes to fetch, has scripts/check-packaging.
# shellcheck disable=SC2034 # the scripts read it
modules=(examples otelconsumer)

# required tells whether OUTFLOW_TEST_REQUIRE names a thing.
required() { [[ ",${OUTFLOW_TEST_REQUIRE:-}," == *",$1,"* ]]; }

# again runs a command up to three times until it succeeds: a download fails now and then.
again() {
  local try
  for try in 1 2 3; do
    "$@" && return
    [ "$try" = 3 ] || sleep "$((5 * try))"
  done
  return 1
}

# in_memory makes a folder for temporary files on a file system that is in memory, and prints its path: a test makes and deletes
# thousands of files within seconds, which costs a disk's file system much more than that. It fails where there is none, and where there
# is not as much room, in KiB, as $1 says. Folders of scripts that were killed go.
in_memory() {
  local room=$1 shm=/dev/shm dir limit
  for dir in "$shm"/outflow-test.*; do
    [ ! -d "$dir" ] || kill -0 "${dir##*.}" 2>/dev/null || rm -rf "$dir"
  done
  [ "$(stat -f -c %T "$shm" 2>/dev/null)" = tmpfs ] && [ -w "$shm" ] || return
  # of the file system, of the machine, and of the container
  [ "$(df -Pk "$shm" | awk 'NR == 2 { print $4 }')" -ge "$room" ] || return
  [ "$(awk '$1 == "MemAvailable:" { print $2 }' /proc/meminfo)" -ge "$((2 * room))" ] || return
  limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null || echo max)
  [ "$limit" = max ] || [ "${#limit}" -gt 15 ] || [ "$((limit / 1024))" -ge "$((2 * room))" ] || return
  dir=$shm/outflow-test.$$
  mkdir "$dir" && chmod 711 "$dir" || return
  # Programs are built there, too.
  printf '#!/bin/sh\n' >"$dir/program" && chmod +x "$dir/program"
  if "$dir/program" 2>/dev/null; then
    rm "$dir/program"
    echo "$dir"
  else
    rm -rf "$dir"
    return 1
  fi
}

# npm_pack fetches packages into the current folder. What npm says is printed only when it fails for good.
npm_pack() {
  local said
  said=$(again npm pack --silent "$@" 2>&1) || fail "npm pack: $said"
}

# use_go puts Go into PATH, also where its installer put it and no profile was read.
use_go() {
  if ! has go && [ -x /usr/local/go/bin/go ]; then
    PATH="$PATH:/usr/local/go/bin"
    export PATH
  fi
  has go || fail "Go is not here: install the version that go.mod names, or a newer one (brew install go, or the Go project's download)"
}

# cache_dir prints the folder for what is fetched once and kept. root's own cache lies in a home that other users may not
# enter, but PostgreSQL runs as another user then. internal/lab/pgserver looks in the same places.
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

# postgres_bins prints the folders with a PostgreSQL server, one a line: where internal/lab/pgserver looks, but for the cache.
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
    if whole_postgres "${bin%/bin}"; then
      echo "$bin"
    fi
  done
}

# has_postgres MAJOR tells whether a server of that major is here.
has_postgres() {
  local bin
  while read -r bin; do
    [[ $("$bin/postgres" --version) != *"(PostgreSQL) $1."* ]] || return 0
  done < <(
    postgres_bins
    cached_bins
  )
  return 1
}

# whole_postgres FOLDER tells whether all of a fetched server is there: one that was cut short is none. internal/lab/pgserver asks the same.
whole_postgres() {
  "$1/bin/initdb" --version >/dev/null 2>&1 && "$1/bin/postgres" --version >/dev/null 2>&1 &&
    [ -n "$(find "$1/lib" -name 'pgoutput.*' -size +0 2>/dev/null)" ] && [ -n "$(find "$1/share" -name postgres.bki -size +0 2>/dev/null)" ]
}

# whole_installations prints the folders of the installations that have all of PostgreSQL's programs, with colons, if there are two.
whole_installations() {
  local bin whole=()
  while read -r bin; do
    if [ -x "$bin/pg_upgrade" ]; then
      whole+=("$bin")
    fi
  done < <(postgres_bins)
  if [ ${#whole[@]} -ge 2 ]; then
    local IFS=:
    echo "${whole[*]}"
  fi
}

# old_nats prints the path of the oldest NATS server that Outflow supports, which it builds into the cache, or nothing if it can't be had.
old_nats() {
  local version=v2.10.23 at
  at=$(cache_dir)/nats-server/$version
  [ -x "$at/nats-server" ] || GOBIN=$at go install "github.com/nats-io/nats-server/v2@$version" >&2 || return 0
  echo "$at/nats-server"
}

# fake_gcs prints the path of a server of Google Cloud Storage's protocol, which it builds into the cache, or nothing if it can't be had.
fake_gcs() {
  local version=v1.56.1 at
  at=$(cache_dir)/fake-gcs-server/$version
  [ -x "$at/fake-gcs-server" ] || GOBIN=$at go install "github.com/fsouza/fake-gcs-server@$version" >&2 || return 0
  echo "$at/fake-gcs-server"
}

# azurite prints the path of a server of Azure Blob Storage's protocol, which it installs into the cache, or nothing if it can't be had.
azurite() {
  local version=3.37.0 at
  has npm && has node || return 0
  at=$(cache_dir)/azurite/$version
  [ -x "$at/node_modules/.bin/azurite-blob" ] ||
    again npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$at" "azurite@$version" >&2 || return 0
  echo "$at/node_modules/.bin/azurite-blob"
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

# apt_get runs apt-get without questions, and waits for whoever else runs it: a fresh machine often does so by itself.
apt_get() {
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -y -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" </dev/null
}

# apt_install installs packages of Debian or Ubuntu; the list of packages may be missing or old on a fresh machine.
apt_install() {
  apt_get install --no-install-recommends "$@" >/dev/null 2>&1 && return
  again apt_get update >/dev/null || echo "apt-get update failed: going on with the list that is here" >&2
  again apt_get install --no-install-recommends "$@" >/dev/null
}

# pack FOLDER INTO packs a folder so that the same files give the same bytes: without owners, in the order of names, with the time that
# SOURCE_DATE_EPOCH says, or the commit's.
pack() {
  local tar=tar
  ! has gtar || tar=gtar
  "$tar" -C "$(dirname "$1")" --format=ustar --sort=name --mtime="@${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}" \
    --owner=0 --group=0 --numeric-owner -cf - "$(basename "$1")" | gzip -9n >"$2"
}
