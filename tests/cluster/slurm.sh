#!/usr/bin/env bash
# A real Slurm of one node, so that what srun does to ranks is seen and not guessed: Debian's munged, slurmctld and
# slurmd, configured for themselves, without systemd or cgroups, as any user. Says "ready", ends when its stdin ends.
#
#   tests/cluster/slurm.sh FOLDER        then, elsewhere: SLURM_CONF=FOLDER/slurm.conf srun -n 2 --mpi=pmi2 COMMAND
#
# Exit status 77 and a reason on stdout: this machine cannot have one.
set -euo pipefail

folder=$1
PATH=$PATH:/usr/sbin
export SLURM_CONF=$folder/slurm.conf
daemons=()

installed() {
    command -v munged slurmctld slurmd srun sbatch && ls /usr/lib/*/pmix2/lib/libpmix.so
} &>/dev/null

install() {
    export DEBIAN_FRONTEND=noninteractive
    timeout 60 apt-get update && timeout 180 apt-get install -y --no-install-recommends slurm-wlm munge libpmix-dev
} </dev/null &>"$folder/apt.log"

cannot() { echo "$1"; exit 77; }

# A daemon never outlives this script, however the script ends.
daemon() { setpriv --pdeathsig KILL "$@" </dev/null &>>"$folder/daemons.log" & daemons+=($!); }

# within SECONDS COMMAND...: true once the command succeeds
within() {
    local end=$((SECONDS + $1))
    until "${@:2}" &>/dev/null; do
        if ((SECONDS > end)); then return 1; fi
        sleep 0.1
    done
}

ready() {
    within "$@" && return
    echo "not ready after $1 s: ${*:2}"
    tail -n 20 "$folder"/*.log
    exit 1
}
idle() { [ "$(sinfo -h -o %T)" = idle ]; }
empty() { [ -z "$(squeue -h)" ]; }
ended() { ! kill -0 "${daemons[@]}"; }

stop() {
    set +e # nothing here may keep the rest from being done
    if [ -e "$folder/state/job_state" ]; then
        squeue -h -o %A | xargs -r scancel --full --signal=KILL
        within 10 empty
    fi
    kill "${daemons[@]}"
    within 10 ended || kill -KILL "${daemons[@]}"
    wait
    # A step whose srun was killed may wait for it for ever.
    left=$(grep -lsxzF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ | cut -d/ -f3)
    kill -KILL $left
} &>/dev/null

if ! installed; then
    [ "$(id -u)" = 0 ] || cannot "Slurm is not installed, and installing it (slurm-wlm munge libpmix-dev) takes root"
    command -v apt-get >/dev/null || cannot "Slurm is not installed, and this is no Debian"
    install && installed || cannot "Slurm could not be installed: $(tail -n 1 "$folder/apt.log")"
fi

read -r port1 port2 < <(python3 -c '
import socket
ends = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(end.getsockname()[1] for end in ends))')
(umask 077 && head -c 128 /dev/urandom >"$folder/munge.key")
mkdir "$folder/state" "$folder/spool"

# Slurm gives no two tasks one core; here a few must run on any machine. Job ids start anywhere, because MPICH names its
# shared memory by them: a killed job leaves its segment behind, and the next job of the same id would hang on that.
cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port1
SlurmdPort=$port2
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/builtin
SelectType=select/linear
SlurmdParameters=config_overrides
FirstJobId=$((1 + (RANDOM << 10 | RANDOM >> 5)))
ReturnToService=2
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$(($(nproc) < 4 ? 4 : $(nproc)))
PartitionName=all Nodes=ALL Default=YES MaxTime=10 OverSubscribe=FORCE:4
CONF

trap stop EXIT
# Forced, because it wants a folder that every user may enter, and pytest's are the tester's alone.
daemon munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --num-threads=2 \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed"
ready 10 munge -n -S "$folder/munge.socket"
daemon slurmctld -D
daemon slurmd -D
ready 30 idle
echo ready
read -r _ || true
