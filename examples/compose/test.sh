#!/usr/bin/env bash
# A tour of the demo that checks each step: up, called, cut, paused, restarted, read without a cloud, misconfigured, down.
# Prints each command as a user types it. The last line is the verdict. Only the images stay, so that the next run need not
# build them.
#
#   COMPOSE   which Compose to use (default: `docker compose` if available, else `docker-compose`)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export COMPOSE_PROJECT_NAME=${COMPOSE_PROJECT_NAME:-causeway-demo}

if [ -z "${COMPOSE:-}" ]; then
  if docker compose version >/dev/null 2>&1; then COMPOSE='docker compose'; else COMPOSE=docker-compose; fi
fi
read -ra compose <<<"$COMPOSE"
passed=0
current='the beginning'
scratch=$(mktemp -d)

compose() { "${compose[@]}" "$@"; }
say() { printf '\n== %s\n' "$*"; current=$*; }
passes() { passed=$((passed + 1)); printf 'ok: %s\n' "$current"; }
fail() { printf 'not ok: %s\n' "$*"; return 1; }
# Prints a command as a user types it, and runs it.
shown() { printf '$ %s\n' "${*/#compose/docker compose}"; "$@"; }

finish() {
  local status=$?
  trap - EXIT
  if [ "$status" -ne 0 ]; then
    printf '\nnot ok: %s\n' "$current"
    compose ps -a 2>/dev/null || compose ps
    compose logs --tail 20 2>&1 | tail -n 100
  fi
  shown compose --profile prometheus down -v >"$scratch/down" 2>&1 || cat "$scratch/down"
  head -n 1 "$scratch/down"
  rm -rf "$scratch"
  if [ "$status" -eq 0 ]; then
    left=$(docker ps -aq --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME"
      docker volume ls -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME"
      docker network ls -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME")
    [ -z "$left" ] || { printf 'left behind: %s\n' "$left"; status=1; }
  fi
  if [ "$status" -eq 0 ]; then
    printf '\ncompose: %d passed, 0 failed\n' "$passed"
  else
    printf '\ncompose: %d passed, 1 failed\n' "$passed"
  fi
  exit "$status"
}
trap finish EXIT

id() { compose ps -q "$1"; }
network() { docker network ls -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" \
  --filter "label=com.docker.compose.network=$1"; }
address() { docker inspect -f '{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}' "$(id "$1")" | cut -d ' ' -f 1; }
call() { compose exec -T client call --max-time 30 "$@"; }

# Repeats a command until it succeeds; gives up after the number of seconds.
within() { # seconds, command...
  local end=$((SECONDS + $1))
  shift
  until "$@" >"$scratch/within" 2>&1; do
    [ "$SECONDS" -lt "$end" ] || { cat "$scratch/within"; return 1; }
    sleep 0.3
  done
}

# Sends a request from the network of another container.
from() { # container, arguments of curl...
  local container=$1
  shift
  docker run --rm --network "container:$(id "$container")" causeway-demo-client:local \
    curl -sS --noproxy '*' --connect-timeout 3 "$@"
}

ended() { [ "$(docker inspect -f '{{.State.Status}}' "$1")" = exited ]; }
health_is() { [ "$(docker inspect -f '{{.State.Health.Status}}' "$2")" = "$1" ]; }
answers_for() { [ "$(call "https://$1:9100/")" = "hello from $2" ]; }
slices=http://127.0.0.1:10270/apis/discovery.k8s.io/v1/endpointslices
read_at_edge() { compose exec -T node-1 curl -sS "$@" "$slices"; }
names() { grep -o '"name":"web-[12]"' "$1" | sort | tr '\n' ' '; }
says_it_is_old() { local head; head=$(read_at_edge -f -D - -o /dev/null) && grep -qi '^warning: 299 causeway' <<<"$head"; }
is_fresh() { local head; head=$(read_at_edge -f -D - -o /dev/null) && ! grep -qi '^warning:' <<<"$head"; }
away() { call -o /dev/null -w '%{http_code}' "https://$1:9100/" | grep -q '^503$'; }

up() {
  say 'all services start, each when the services that it needs are healthy'
  shown compose up -d --build
  passes
  image=$(docker image inspect -f '{{.Size}}' causeway:local)
  say "the image has $image bytes (60 MB at most), no shell, and does not run as root"
  [ "$image" -le 60000000 ] || fail "the image has $image bytes; the limit is 60 MB"
  [ "$(docker image inspect -f '{{.Config.User}}' causeway:local)" = 65532:65532 ]
  ! docker run --rm --entrypoint /bin/sh causeway:local -c true 2>/dev/null || fail 'the image has a shell'
  passes
}

no_way_in() {
  say 'the gateway cannot dial a site: not the edge, not the app'
  local site
  for site in 1 2; do
    ! from gateway "http://$(address "edge-$site"):10266/healthz" || fail "edge-$site answers the gateway"
    ! from gateway "http://$(address "app-$site")/" || fail "app-$site answers the gateway"
    # On the site itself the same address answers: only the network separates the gateway from it.
    [ "$(from "edge-$site" "http://$(address "app-$site")/")" = "hello from app-$site" ] || fail "app-$site does not answer"
  done
  passes
}

calls() {
  say 'both nodes answer by name, over verified HTTPS'
  shown compose exec -T client call https://edge-1:9100/
  shown compose exec -T client call https://edge-2:9100/
  answers_for edge-1 app-1 && answers_for edge-2 app-2
  passes
  say 'without a client certificate there is no answer'
  [ "$(compose exec -T client curl -s --cacert /run/causeway/ca.pem -o /dev/null -w '%{http_code}' https://edge-1:9100/)" = 401 ]
  passes
  say 'a websocket'
  shown compose exec -T client websocket wss://edge-2:9100/echo hello-node
  passes
  say 'a download of 200 MB, with its checksum'
  local wanted found
  wanted=$(call https://edge-1:9100/download.sha256 | cut -d ' ' -f 1)
  found=$(compose exec -T client sh -c 'call -w "%{stderr}%{size_download} bytes at %{speed_download} B/s\n" https://edge-1:9100/download | sha256sum' | cut -d ' ' -f 1)
  [ -n "$wanted" ] && [ "$wanted" = "$found" ] || fail "sha256 $found, not $wanted"
  passes
}

outage() {
  say 'site-1 loses its network for 20 s: clients get an error at once, and it reconnects by itself'
  local edge site began since
  edge=$(id edge-1) site=$(network site-1)
  began=$SECONDS
  shown docker network disconnect "$site" "$edge"
  within 18 away edge-1
  call https://edge-1:9100/ | tee "$scratch/away"
  grep -q node_not_connected "$scratch/away"
  answers_for edge-2 app-2
  until [ $((SECONDS - began)) -ge 20 ]; do sleep 0.2; done
  shown docker network connect --alias edge-1 "$site" "$edge"
  since=$SECONDS
  within 15 answers_for edge-1 app-1
  printf 'back after %d s\n' $((SECONDS - since))
  passes

  say 'a paused edge is disconnected, and connects again when it continues'
  shown compose pause edge-2
  within 20 away edge-2
  shown compose unpause edge-2
  within 15 answers_for edge-2 app-2
  passes

  say 'the gateway restarts: both edges connect again'
  shown compose restart gateway
  within 20 answers_for edge-1 app-1
  within 20 answers_for edge-2 app-2
  passes

  say 'the connected edges'
  shown compose exec -T gateway /causeway status | tee "$scratch/status"
  [ "$(grep -c '^edge-[12] *connected' "$scratch/status")" = 2 ]
  passes
}

reading() {
  say 'a program on a node reads its cluster from the edge, also while the cloud is unavailable'
  within 20 is_fresh
  shown compose exec -T node-1 curl -sS "$slices" | tee "$scratch/before"; echo
  [ "$(names "$scratch/before")" = '"name":"web-1" "name":"web-2" ' ] || fail 'not both slices'
  shown compose stop gateway
  ! call --connect-timeout 3 https://edge-1:9100/ >/dev/null 2>&1 || fail 'the gateway still answers'
  shown compose exec -T node-1 curl -sS "$slices" | tee "$scratch/after"; echo
  cmp <(tail -n 1 "$scratch/before") <(tail -n 1 "$scratch/after")
  # Responses to readers soon have a warning with their age.
  within 20 says_it_is_old
  passes
  say 'the cloud is back: reads are fresh again, and both nodes answer'
  shown compose start gateway
  within 30 is_fresh
  within 20 answers_for edge-1 app-1
  within 20 answers_for edge-2 app-2
  passes
}

prometheus() {
  say 'Prometheus scrapes the gateway, and edges and apps through the tunnels'
  shown compose --profile prometheus up -d
  targets_up() {
    compose --profile prometheus exec -T gateway /causeway health --ready &&
      from gateway -G 'http://127.0.0.1:9090/api/v1/query' --data-urlencode 'query=sum(up)' | grep -q '"5"\]'
  }
  within 60 targets_up
  from gateway -G 'http://127.0.0.1:9090/api/v1/query' --data-urlencode 'query=demo_app_up' | tee "$scratch/apps"; echo
  grep -q app-1 "$scratch/apps" && grep -q app-2 "$scratch/apps"
  passes
}

# Starts an edge with these settings as a container beside the demo, and checks its last line.
stray() { # name, arguments of docker run...
  local name=$COMPOSE_PROJECT_NAME-$1
  shift
  docker rm -f "$name" >/dev/null 2>&1 || true
  docker run -d --name "$name" --label "com.docker.compose.project=$COMPOSE_PROJECT_NAME" --read-only --cap-drop ALL \
    --network "$(docker network inspect -f '{{.Name}}' "$(network site-1)")" --add-host gateway.example:host-gateway \
    --tmpfs /var/lib/causeway-edge:uid=65532,gid=65532,mode=0700 "$@" >/dev/null
  printf '%s\n' "$name"
}

says_and_ends() { # container, words that its last line has
  within 20 ended "$1"
  docker logs --tail 1 "$1" 2>&1 | tee "$scratch/said"
  grep -q "$2" "$scratch/said" || fail "not in the last line: $2"
  [ "$(docker inspect -f '{{.State.ExitCode}}' "$1")" != 0 ] || fail 'ended with 0'
  docker rm -f "$1" >/dev/null
}

bad_input() {
  local name enrol edge="$PWD/edge.yaml:/etc/causeway/edge.yaml:ro"
  enrol=$(docker volume ls -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" \
    --filter label=com.docker.compose.volume=enrol)
  say 'a used token: the edge prints the reason and ends'
  name=$(stray spent -v "$enrol:/run/causeway:ro" -v "$edge" causeway:local \
    edge --config /etc/causeway/edge.yaml --join-file /run/causeway/edge-1.token)
  says_and_ends "$name" 'already used'
  passes
  say 'a file without a token: the edge prints the reason and ends'
  name=$(stray wrong -v "$enrol:/run/causeway:ro" -v "$edge" causeway:local \
    edge --config /etc/causeway/edge.yaml --join-file /run/causeway/ca.pem)
  says_and_ends "$name" 'token'
  passes
  say 'a missing volume: the edge names the file and ends'
  name=$(stray missing -v "$edge" causeway:local \
    edge --config /etc/causeway/edge.yaml --join-file /run/causeway/edge-1.token)
  says_and_ends "$name" '/run/causeway/edge-1.token'
  passes
  say 'a gateway without its volume: it prints how to make a CA and ends'
  name=$(stray empty --tmpfs /var/lib/causeway:uid=65532,gid=65532,mode=0700 causeway:local gateway)
  says_and_ends "$name" 'ca init'
  passes
  say 'an unreachable gateway: the edge retries, logs the reason, and is unhealthy'
  compose exec -T gateway /causeway token create --node edge-3 2>/dev/null >"$scratch/token"
  name=$(stray away -v "$edge" -e "CAUSEWAY_JOIN=$(cat "$scratch/token")" causeway:local \
    edge --config /etc/causeway/edge.yaml --gateway gateway.example:1)
  within 60 health_is unhealthy "$name"
  docker logs --tail 1 "$name" 2>&1 | tee "$scratch/said"
  grep -q 'not joined yet' "$scratch/said" && grep -q 'refused' "$scratch/said"
  docker inspect -f '{{range .State.Health.Log}}{{.Output}}{{end}}' "$name" | tail -n 1
  docker rm -f "$name" >/dev/null
  passes
}

down() {
  say 'the gateway, as process 1, drains when it is stopped'
  local gateway
  gateway=$(id gateway)
  shown compose stop gateway
  [ "$(docker inspect -f '{{.State.ExitCode}}' "$gateway")" = 0 ] || fail 'it was killed'
  passes
}

up
no_way_in
calls
outage
reading
prometheus
bad_input
down
