#!/usr/bin/env bash
# A real SLURM on this machine, for trying jobs with job.scheduler.mode=SLURM:  scripts/slurm_local.sh start|stop|status
#
# As root, on Debian or Ubuntu. `start` installs slurm-wlm and munge if they are missing and runs munged, slurmctld and
# slurmd on loopback; configuration, logs and state are in a folder of their own, /etc/slurm is not touched. The machine
# becomes one node that claims 8 CPUs, however many there are. Ranks that are to end are killed after 3 seconds. There is
# no accounting: `sacct` does not work, `squeue` does.
# `stop` ends these three daemons, with any job, and nothing else. After `start`:
#
#   export SLURM_CONF=/var/lib/slurm-local/slurm.conf
#   sinfo
set -euo pipefail

folder="${SLURM_LOCAL_DIR:-/var/lib/slurm-local}"
cpus="${SLURM_LOCAL_CPUS:-8}"
conf="$folder/slurm.conf"
node="$(hostname -s)"
daemons=(slurmd slurmctld munged)  # in the order in which they are stopped

say() { echo "slurm_local: $*"; }
die() { say "$*" >&2; exit 1; }
pid_file() { if [ "$1" = munged ]; then echo "$folder/munge/munged.pid"; else echo "$folder/$1.pid"; fi; }
running() { [ -s "$(pid_file "$1")" ] && [ "$(cat "/proc/$(cat "$(pid_file "$1")")/comm" 2>/dev/null)" = "$1" ]; }

install_missing() {
    local program missing=0
    for program in munged slurmctld slurmd sbatch; do command -v "$program" >/dev/null || missing=1; done
    ((missing)) || return 0
    command -v apt-get >/dev/null || die "slurm is not installed, and there is no apt-get to install it with"
    say "installing slurm-wlm and munge"
    mkdir -p "$folder"
    # a policy of 101 keeps the packages from starting daemons of their own
    local policy=/usr/sbin/policy-rc.d made_policy=0
    if [ ! -e "$policy" ]; then printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && made_policy=1; fi
    local status=0
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge; } \
        >"$folder/apt.log" 2>&1 || status=$?
    if ((made_policy)); then rm -f "$policy"; fi
    ((status == 0)) || die "installing failed, see $folder/apt.log"
}

write_configuration() {
    mkdir -p "$folder/state" "$folder/spool" "$folder/munge"
    if [ ! -s "$folder/munge/munge.key" ]; then
        (umask 077 && head -c 1024 /dev/urandom >"$folder/munge/munge.key")
    fi
    chown -R munge: "$folder/munge"
    chmod 755 "$folder" "$folder/munge"
    cat >"$conf" <<CONF
# written by scripts/slurm_local.sh
ClusterName=local
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$folder/munge/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$(pid_file slurmctld)
SlurmdPidFile=$(pid_file slurmd)
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=3
NodeName=$node NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=1000000 State=UNKNOWN
PartitionName=local Nodes=$node Default=YES MaxTime=INFINITE State=UP
CONF
}

start_daemons() {
    running munged || runuser -u munge -- munged --key-file="$folder/munge/munge.key" \
        --socket="$folder/munge/munge.socket" --pid-file="$(pid_file munged)" --seed-file="$folder/munge/munge.seed" \
        --log-file="$folder/munge/munged.log" || die "munged did not start, see $folder/munge/munged.log"
    running slurmctld || slurmctld -f "$conf" || die "slurmctld did not start, see $folder/slurmctld.log"
    running slurmd || slurmd -f "$conf" || die "slurmd did not start, see $folder/slurmd.log"
    for _ in $(seq 60); do
        if [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; then return; fi
        scontrol update NodeName="$node" State=RESUME 2>/dev/null || true
        sleep 1
    done
    sinfo >&2 || true
    die "the node is not idle after a minute, see $folder/slurmctld.log and $folder/slurmd.log"
}

export SLURM_CONF="$conf"
case "${1:-}" in start | stop) [ "$(id -u)" = 0 ] || die "$1 needs root: slurmd starts jobs as their users" ;; esac
case "${1:-}" in
    start)
        install_missing
        write_configuration
        start_daemons
        say "SLURM $(sinfo --version | cut -d' ' -f2) is up: node $node, $cpus CPUs, partition local. Now:"
        echo "export SLURM_CONF=$conf"
        ;;
    stop)
        if running slurmctld; then
            squeue -h -o %A | sort -u | xargs -r scancel
            for _ in $(seq 20); do [ -n "$(squeue -h)" ] || break; sleep 0.5; done  # or their processes would stay
        fi
        for daemon in "${daemons[@]}"; do
            if ! running "$daemon"; then continue; fi
            pid="$(cat "$(pid_file "$daemon")")"
            kill "$pid"
            for _ in $(seq 50); do [ -d "/proc/$pid" ] || break; sleep 0.2; done
            if [ -d "/proc/$pid" ]; then die "$daemon (process $pid) does not end"; fi
            say "$daemon stopped"
        done
        ;;
    status)
        for daemon in "${daemons[@]}"; do running "$daemon" || die "$daemon is not running; start with: $0 start"; done
        sinfo
        squeue
        ;;
    *) die "usage: $0 start|stop|status" ;;
esac
