#!/usr/bin/env bash
# Two hosts on one machine, so that what crosses a wire really does: each has a network, a name, a /sys and a
# /dev/shm of its own, and a cable (a veth pair) joins them. A host lives as long as the processes in it, so nothing
# is left to clean away.
#
#   tests/cluster/hosts.sh up [RATE]         says "ready HOST0 HOST1", ends when its stdin ends; RATE as in tc: 1gbit
#   tests/cluster/hosts.sh up RATE FOLDER    has an sshd on each host besides, for the command FOLDER/ssh; RATE may be ""
#   tests/cluster/hosts.sh HOST COMMAND...   runs a command on a host, as ssh does: mpiexec -launcher-exec hosts.sh
#
# The addresses are 10.0.0.1 and 10.0.0.2. What sshd starts descends from nobody who asked for it, as on a real cluster.
# Exit status 77 and a reason on stdout: this machine cannot have such hosts.
set -euo pipefail

PATH=$PATH:/usr/sbin:/sbin

on() { nsenter --target "$1" --net --uts --mount --wd="$PWD" "${@:2}"; }
named() { [ "$(on "$1" hostname)" = "$(name "$1")" ]; }
name() { echo "host-$1"; }
up() { [ "$(on "$1" cat /sys/class/net/eth0/operstate)" = up ]; }

ready() {
    for _ in {1..100}; do
        if "$@" 2>/dev/null; then return; fi
        sleep 0.05
    done
    echo "not ready after 5 s: $*"
    exit 1
}

if [ "$1" != up ]; then
    [ "$1" = -x ] && shift # hydra takes us for ssh
    host=$1
    shift
    exec nsenter --target "${host#host-}" --net --uts --mount --wd="$PWD" sh -c "exec $*" # as ssh: one line for a shell
fi

for tool in ip tc nsenter unshare setpriv; do
    command -v $tool >/dev/null || { echo "two hosts need $tool (Debian: iproute2, util-linux)"; exit 77; }
done
[ "$(id -u)" = 0 ] || { echo "network namespaces take root"; exit 77; }
unshare --net --uts --mount true 2>/dev/null || { echo "network namespaces are not allowed here"; exit 77; }

folder=${3:-}
if [ -n "$folder" ] && ! command -v sshd >/dev/null; then
    command -v apt-get >/dev/null || { echo "ssh between hosts needs sshd, and this is no Debian"; exit 77; }
    { timeout 60 apt-get update && DEBIAN_FRONTEND=noninteractive timeout 120 apt-get install -y \
        --no-install-recommends openssh-server; } </dev/null &>"$folder/apt.log" || true
    command -v sshd >/dev/null || { echo "sshd could not be installed: $(tail -n 1 "$folder/apt.log")"; exit 77; }
fi

pids=()
trap 'kill "${pids[@]}" 2>/dev/null; wait' EXIT
for _ in 0 1; do
    setpriv --pdeathsig KILL unshare --net --uts --mount sh -c '
        mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm && hostname host-$$ && exec sleep infinity
    ' </dev/null >/dev/null &
    pids+=($!)
done
for pid in "${pids[@]}"; do ready named "$pid"; done

ip link add eth0 netns "${pids[0]}" type veth peer name eth0 netns "${pids[1]}"
for rank in 0 1; do
    on "${pids[rank]}" ip address add "10.0.0.$((rank + 1))/24" dev eth0
    on "${pids[rank]}" ip link set eth0 up
    on "${pids[rank]}" ip link set lo up
    [ -z "${2:-}" ] || on "${pids[rank]}" tc qdisc add dev eth0 root tbf rate "$2" burst 256kb latency 50ms
done
for pid in "${pids[@]}"; do ready up "$pid"; done # the kernel may take a second, and UCX ignores a link that is not up

# One sshd a host, for this user with this key. Without PAM, which would move its children out of our sight.
if [ -n "$folder" ]; then
    ssh-keygen -q -t ed25519 -N "" -f "$folder/key" </dev/null
    chmod 600 "$folder/key"
    cat >"$folder/sshd_config" <<CONF
HostKey $folder/key
AuthorizedKeysFile $folder/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
PidFile none
CONF
    cat >"$folder/ssh_config" <<CONF
Host *
    IdentityFile $folder/key
    StrictHostKeyChecking no
    UserKnownHostsFile $folder/known_hosts
    LogLevel ERROR
    BatchMode yes
    ConnectTimeout 5
CONF
    printf '#!/bin/sh\nexec ssh -F %q/ssh_config "$@"\n' "$folder" >"$folder/ssh"
    chmod +x "$folder/ssh"
    sshd=$(command -v sshd)
    for rank in 0 1; do
        on "${pids[rank]}" sh -c "mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd"
        setpriv --pdeathsig KILL nsenter --target "${pids[rank]}" --net --uts --mount \
            "$sshd" -D -e -f "$folder/sshd_config" -o ListenAddress="10.0.0.$((rank + 1))" </dev/null &>>"$folder/sshd.log" &
        pids+=($!)
    done
    answers() { on "${pids[0]}" "$folder/ssh" "10.0.0.$1" true; }
    ready answers 1
    ready answers 2
fi

echo "ready $(name "${pids[0]}") $(name "${pids[1]}")"
read -r _ || true
