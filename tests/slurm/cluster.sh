#!/usr/bin/env bash
# A real Slurm on one machine, for tests: no systemd, loopback only, everything in one directory.
#
#   cluster.sh check                  say what is missing, if anything
#   cluster.sh install                install it, with apt
#   cluster.sh start DIR              make it, or find it running; prints the lines to `eval`
#   cluster.sh stop DIR               end it and everything it started, remove DIR
#   cluster.sh kill-node NODE DIR     SIGKILL a node's slurmd: its tasks live on
#   cluster.sh start-node NODE DIR    start it again
#   cluster.sh processes DIR [NAME=VALUE]
#                                     processes of jobs (with that in their environment), one a line
#
# Needs root, slurm-wlm and munge (accounting: slurmdbd, mariadb-server). Several clusters may run side by side. Nodes of 8 (pretended) CPUs:
#   gen1 gen2 (2 GPUs)   train1 train2 (4 GPUs)   a1 a2 (4 GPUs; sort before the others)
# Partitions: gen, train, early (a1 a2), all; low (requeued when high wants its nodes) and high.
#
#   PROCTRACK=cgroup|pgid   how Slurm tracks processes (default: cgroup where its v1 freezer is writable)
#   ACCOUNTING=1            with slurmdbd and its own mariadb
#   OWNER=PID               stop by itself once that process is gone
set -euo pipefail

NODES=(gen1 gen2 train1 train2 a1 a2)
START_S=60
FREEZER=/sys/fs/cgroup/freezer
PATH=$PATH:/usr/sbin:/sbin

die() {
    printf 'cluster.sh: %s\n' "$*" >&2
    exit 1
}

# pids PATTERN [NAME=VALUE]: processes of this cluster whose environment has a line that matches
# PATTERN (extended), and the given one.
pids() {
    { grep -lzxF -- "SLURM_CONF=$CONF" /proc/[0-9]*/environ |
        xargs -r grep -lzE -- "$1" | xargs -r grep -lzxF -- "${2:-SLURM_CONF=$CONF}" |
        cut -d/ -f3; } 2>/dev/null || true
}

# Roles drop SLURM_JOB_ID but have a run directory.
JOB_PROCESS='^(SLURM_JOB_ID|SLURM_GRPO_RUN_DIR)='

# daemon_pids NAME: not the slurmstepd processes, which inherit the environment.
daemon_pids() {
    local pid
    for pid in $(pids "^SLURM_TEST_DAEMON=$1\$"); do
        [[ $(cat "/proc/$pid/comm" 2>/dev/null) != "${1%%-*}" ]] || echo "$pid"
    done
}

# wait_for WHAT SECONDS COMMAND...: until the command succeeds.
wait_for() {
    local what=$1 end=$((SECONDS + $2))
    shift 2
    until "$@" >/dev/null 2>&1; do
        if ((SECONDS >= end)); then
            tail -n 15 "$DIR"/log/* >&2 || true
            die "waited in vain for $what; the ends of its logs are above."
        fi
        sleep 0.1
    done
}

# daemon NAME COMMAND...: in the background, in the foreground mode of the command.
daemon() {
    local name=$1
    shift
    env -i PATH="$PATH" HOME="${HOME:-/root}" LANG=C SLURM_CONF="$CONF" SLURM_TEST_DAEMON="$name" \
        setsid "$@" </dev/null >>"$DIR/log/$name.out" 2>&1 &
}

# Sets PORT to one that nobody listens on, below the range the kernel hands out. Another cluster
# that starts at this moment draws from the same 10000.
free_port() {
    while true; do
        PORT=$((20000 + (RANDOM * 32768 + RANDOM) % 10000))
        [[ " $TAKEN " == *" $PORT "* ]] && continue
        TAKEN+=" $PORT"
        (exec 3<>"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null || return 0
    done
}
TAKEN=

choose_proctrack() {
    local probe=$FREEZER/slurm_test_$$ writable=0
    if mkdir "$probe" 2>/dev/null && [[ -e $probe/freezer.state ]]; then writable=1; fi
    rmdir "$probe" 2>/dev/null || true
    case ${PROCTRACK:-} in
        '') if ((writable)); then echo cgroup; else echo pgid; fi ;;
        pgid) echo pgid ;;
        cgroup)
            ((writable)) || die "PROCTRACK=cgroup needs a writable v1 freezer at $FREEZER."
            echo cgroup
            ;;
        *) die "PROCTRACK is '$PROCTRACK'; it must be cgroup or pgid." ;;
    esac
}

# Real character devices: Slurm sets CUDA_VISIBLE_DEVICES for those only.
make_gpus() {
    local i
    mkdir "$DIR/gpu"
    for i in 0 1 2 3; do
        mknod -m 666 "$DIR/gpu/nv$i" c 1 3 2>/dev/null || return 1
    done
}

# Job ids differ between clusters, which share the cgroups of nodes of one name. A requeued job waits
# for cred_expire and a second: a credential made when its former life was killed would be refused.
write_config() {
    local host gpus=0 node n port accounting=none
    host=$(hostname -s)
    make_gpus && gpus=1
    free_port
    cat >"$CONF" <<END
ClusterName=ci
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$DIR/munge/socket,cred_expire=10
SlurmctldPort=$PORT
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/pid/slurmctld
SlurmdPidFile=$DIR/pid/slurmd.%n
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
ProctrackType=proctrack/$PROCTRACK
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_resolution=1,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
JobRequeue=1
FirstJobId=$(((PORT - 19999) * 1000))
KillWait=10
ReturnToService=2
InactiveLimit=0
MinJobAge=36000
SlurmctldTimeout=20
SlurmdTimeout=20
SlurmdParameters=config_overrides
PartitionName=DEFAULT MaxTime=60 DefaultTime=10 State=UP PreemptMode=OFF PriorityTier=5
PartitionName=gen Nodes=gen[1-2] Default=YES
PartitionName=train Nodes=train[1-2]
PartitionName=early Nodes=a[1-2]
PartitionName=all Nodes=ALL
PartitionName=low Nodes=gen[1-2],train[1-2] PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes=gen[1-2],train[1-2] PriorityTier=10
END
    ((gpus)) && echo GresTypes=gpu >>"$CONF"
    for node in "${NODES[@]}"; do
        free_port
        n=4
        [[ $node == gen* ]] && n=2
        printf 'NodeName=%s NodeHostname=%s NodeAddr=127.0.0.1 Port=%s CPUs=8 RealMemory=16000%s\n' \
            "$node" "$host" "$PORT" "$( ((gpus)) && echo " Gres=gpu:$n")" >>"$CONF"
        ((gpus)) && echo "NodeName=$node Name=gpu File=$DIR/gpu/nv[0-$((n - 1))]" >>"$DIR/gres.conf"
    done
    if [[ ${ACCOUNTING:-} == 1 ]]; then
        free_port && DATABASE_PORT=$PORT
        free_port && DBD_PORT=$PORT
        cat >>"$CONF" <<END
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$DBD_PORT
AccountingStoragePass=$DIR/munge/socket
END
    else
        echo AccountingStorageType=accounting_storage/none >>"$CONF"
    fi
    if [[ $PROCTRACK == cgroup ]]; then
        printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n' >"$DIR/cgroup.conf"
    fi
}

start_accounting() {
    local host password=ci
    host=$(hostname -s)
    mariadb-install-db --no-defaults --auth-root-authentication-method=normal --user=root \
        --skip-test-db --datadir="$DIR/database" >"$DIR/log/mariadb-install.out" 2>&1 ||
        die "mariadb-install-db failed: $(tail -n 5 "$DIR/log/mariadb-install.out")"
    daemon mariadbd mariadbd --no-defaults --user=root --datadir="$DIR/database" \
        --bind-address=127.0.0.1 --port="$DATABASE_PORT" --socket="$DIR/database.socket" \
        --innodb-buffer-pool-size=32M --pid-file="$DIR/pid/mariadbd"
    wait_for "mariadbd" "$START_S" mariadb --no-defaults -S "$DIR/database.socket" -e 'select 1'
    mariadb --no-defaults -S "$DIR/database.socket" -e "
        create database slurm; create user slurm@'%' identified by '$password';
        grant all on slurm.* to slurm@'%';"
    (
        umask 077
        cat >"$DIR/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$DIR/munge/socket
DbdHost=$host
DbdAddr=127.0.0.1
DbdPort=$DBD_PORT
SlurmUser=root
LogFile=$DIR/log/slurmdbd.log
PidFile=$DIR/pid/slurmdbd
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$DATABASE_PORT
StorageUser=slurm
StoragePass=$password
StorageLoc=slurm
END
    )
    daemon slurmdbd slurmdbd -D
    wait_for "slurmdbd" "$START_S" env SLURM_CONF="$CONF" sacctmgr -n show cluster
}

start_node() {
    daemon "slurmd-$1" slurmd -D -f "$CONF" -N "$1"
}

listens() {
    (exec 3<>"/dev/tcp/127.0.0.1/$(sed -n "s/^NodeName=$1 .* Port=\([0-9]*\) .*/\1/p" "$CONF")")
}

# Kills it; succeeds when nothing of it is left.
is_killed() {
    local pid all
    all=$(daemon_pids "slurmd-$1")
    for pid in $all; do kill -KILL "$pid" 2>/dev/null || true; done
    [[ -z $all ]]
}

all_idle() {
    (($(SLURM_CONF=$CONF sinfo -h -N -p all -t idle -o %N | wc -l) == ${#NODES[@]}))
}

watch_owner() {
    local started
    started=$(cut -d' ' -f22 "/proc/$OWNER/stat") || die "OWNER=$OWNER is not running."
    daemon watchdog bash -c "
        while [[ \$(cut -d' ' -f22 /proc/$OWNER/stat 2>/dev/null) == $started ]]; do sleep 1; done
        exec env -u SLURM_TEST_DAEMON bash '$SCRIPT' stop '$DIR'"
}

check() {
    local tool
    ((EUID == 0)) || die "only root can start slurmd and munged."
    for tool in munged slurmctld slurmd sinfo ${ACCOUNTING:+mariadbd slurmdbd}; do
        command -v "$tool" >/dev/null || die "$tool is missing: apt-get install slurm-wlm munge" \
            "${ACCOUNTING:+slurmdbd mariadb-server}"
    done
}

# The packages' own services are not to start: policy-rc.d says so to Debian's scripts.
install() {
    local policy=/usr/sbin/policy-rc.d
    ! (ACCOUNTING=1 check 2>/dev/null) || return 0
    ((EUID == 0)) || die "only root can install and start Slurm."
    command -v apt-get >/dev/null || die "there is no apt-get to install slurm-wlm and munge with."
    if [[ ! -e $policy ]]; then
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    export DEBIAN_FRONTEND=noninteractive
    apt-get -q update || true # an old list may still do
    apt-get -q install -y --no-install-recommends slurm-wlm munge ||
        die "apt-get cannot install slurm-wlm and munge."
    apt-get -q install -y --no-install-recommends slurmdbd mariadb-server || true
}

start() {
    local node
    check
    ((${#DIR} < 80)) || die "$DIR is too long for a socket's path; at most 80 characters."
    if [[ -e $DIR/cluster ]]; then
        if [[ -n $(daemon_pids slurmctld) ]] && all_idle 2>/dev/null; then
            cat "$DIR/cluster"
            return
        fi
        stop
    fi
    mkdir -p "$DIR"
    [[ -z $(ls -A "$DIR") ]] || die "$DIR holds other files; name a new or empty directory."
    chmod 755 "$DIR"
    printf "export SLURM_CONF='%s'\n" "$CONF" >"$DIR/cluster"
    mkdir "$DIR"/{munge,state,spool,log,pid}
    PROCTRACK=$(choose_proctrack)
    write_config
    (umask 077 && head -c 128 /dev/urandom >"$DIR/munge/key")
    if [[ -n ${OWNER:-} ]]; then watch_owner; fi
    daemon munged munged --foreground --force --num-threads=2 --socket="$DIR/munge/socket" \
        --key-file="$DIR/munge/key" --pid-file="$DIR/pid/munged" \
        --log-file="$DIR/log/munged.log" --seed-file="$DIR/munge/seed"
    wait_for munged "$START_S" munge -n --socket="$DIR/munge/socket"
    if [[ ${ACCOUNTING:-} == 1 ]]; then start_accounting; fi
    daemon slurmctld slurmctld -D -c -f "$CONF"
    for node in "${NODES[@]}"; do start_node "$node"; done
    wait_for "all nodes to be idle" "$START_S" all_idle
    cat "$DIR/cluster"
}

# Kills what is there; succeeds when nothing is, also nothing that had just been started.
is_gone() {
    local pid all
    all=$(pids "$JOB_PROCESS|^SLURM_TEST_DAEMON=")
    for pid in $all; do kill -KILL "$pid" 2>/dev/null || true; done
    [[ -z $all ]]
}

stop() {
    local node first id directory
    [[ -e $DIR/cluster ]] || { [[ ! -e $DIR ]] || die "$DIR holds no cluster."; return 0; }
    wait_for "the cluster's processes to end" "$START_S" is_gone
    first=$(sed -n 's/^FirstJobId=//p' "$CONF")
    for node in "${NODES[@]}"; do
        for directory in "$FREEZER/slurm_$node"/uid_*/job_*; do
            id=${directory##*_}
            [[ ! -d $directory ]] || ((id < first || id >= first + 1000)) ||
                find "$directory" -depth -type d -exec rmdir {} + || true
        done
        # Fails while another cluster has jobs there; Slurm makes them again for its next one.
        rmdir "$FREEZER/slurm_$node"/uid_* "$FREEZER/slurm_$node" 2>/dev/null || true
    done
    rm -rf "$DIR"
}

case ${1:-}:$# in
    check:1 | install:1) DIR=/nowhere ;;
    start:2 | stop:2 | processes:[23]) DIR=$2 ;;
    kill-node:3 | start-node:3) DIR=$3 ;;
    *) die "see the first lines of this file for its use." ;;
esac
SCRIPT=$(realpath "${BASH_SOURCE[0]}")
DIR=$(realpath -m "$DIR")
CONF=$DIR/slurm.conf
case $1 in
    check | install | start | stop) "$1" ;;
    kill-node)
        [[ -n $(daemon_pids "slurmd-$2") ]] || die "no slurmd of $2 is running."
        wait_for "slurmd of $2 to end" "$START_S" is_killed "$2"
        ;;
    start-node)
        start_node "$2"
        wait_for "slurmd of $2 to listen" "$START_S" listens "$2"
        ;;
    processes)
        for pid in $(pids "$JOB_PROCESS" "${3:-}"); do ps -o pid=,args= -p "$pid" || true; done
        ;;
esac
