#!/bin/sh
# Calibrates the bundled model on a real Slurm, which runs on this machine for the time of the test: two nodes, 8 token
# shards, 4 layer parts. A task is killed, a node is lost with all that runs on it, a node's daemon is restarted, and
# one task runs twice at once. The artifact must have the bytes of `kvsmith calibrate` all the same.
#
#     scripts/cluster/test.sh KVSMITH [SCRATCH [KILLS]]
#
# With KILLS, so many tasks are killed at random moments instead, each at most three times.
# Slurm runs as the user who calls this, and listens on 127.0.0.1 alone; it needs neither root nor munge nor systemd. It
# does not check who submits jobs (auth/none), so do not run this where people have accounts whom you do not trust.
# SCRATCH (default: target/cluster) keeps the configuration, the logs and the results until the next time.
set -eu

kvsmith=$(realpath "$1")
scratch=${2:-target/cluster}
rm -rf "$scratch"
mkdir -p "$scratch"
scratch=$(realpath "$scratch")
work=$scratch/work
kills=${3:-0}
user=$(id -un)
PATH=$PATH:/usr/sbin:/sbin
start=$(date +%s)

say() { printf '%4d s  %s\n' $(($(date +%s) - start)) "$*"; }
skip() { echo "skipped: $*" && exit 0; }
fail() {
    echo "error: $*" >&2
    echo "hint: the logs are $scratch/*.log and $work/logs/*.log" >&2
    exit 1
}

[ "$(uname)" = Linux ] || skip "the test of the cluster scripts runs on Linux only"
for program in slurmctld slurmd sbatch squeue scontrol sinfo; do
    command -v $program >/dev/null 2>&1 || skip "there is no $program (Debian: slurmctld slurmd slurm-client)"
done

# What a job of another Slurm, or the caller, has set.
for name in $(env | sed -n 's/^\(\(SLURM\|SBATCH\|SQUEUE\|SINFO\)[A-Z]*_[A-Z0-9_]*\)=.*/\1/p') \
    OUTPUT SEED SECTIONS CODEBOOK SIGNS PRIORS WPQ ROTATION TAIL VERDICT; do
    unset "$name"
done
export SLURM_CONF="$scratch/slurm.conf"

# environ|cmdline pattern: the processes of this Slurm, its tasks included, that have an entry like this there.
processes() {
    ours=$(grep -lzx "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ 2>/dev/null | sed "s/environ\$/$1/") || true
    # shellcheck disable=SC2086
    [ -z "$ours" ] || grep -lzxe "$2" $ours 2>/dev/null | sed 's,^/proc/\([0-9]*\)/.*,\1,'
}

# Ends all of them by their numbers: the daemons first with TERM, then what is left.
stop() {
    trap '' INT TERM
    for signal in TERM KILL KILL; do
        tries=0
        while pids=$(processes environ 'SLURM_CONF=.*') && [ -n "$pids" ] && [ $tries -lt 25 ]; do
            # shellcheck disable=SC2086
            [ $tries != 0 ] || kill -$signal $pids 2>/dev/null || true
            tries=$((tries + 1))
            sleep 0.2
        done
    done
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# seconds message command...: waits until the command succeeds.
await() {
    limit=$1 message=$2 tries=0
    shift 2
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt $((limit * 5)) ] || fail "$message"
        sleep 0.2
    done
}

mkdir -p "$scratch/state" "$scratch/n1" "$scratch/n2" "$work/logs"
port=$((17000 + $$ % 5000 * 3))
# A task that goes back into the queue waits as long as credentials live (cred_expire): 120 s by default, 5 s at least.
cat >"$SLURM_CONF" <<END
ClusterName=kvsmith
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$scratch/state
SlurmdSpoolDir=$scratch/%n
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmdPidFile=$scratch/%n.pid
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=60
BatchStartTimeout=2
KillWait=2
SlurmdParameters=config_overrides
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 2))] CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
END

# name program argument...: starts a daemon; sets the variable of its name to its process. slurmstepd writes its title
# over the first variables.
daemon() {
    name=$1
    shift
    env -i TITLE=this-is-room-for-the-title PATH="$PATH" SLURM_CONF="$SLURM_CONF" SLURMD_NODENAME="$name" "$@" \
        >>"$scratch/$name.log" 2>&1 &
    eval "$name=$!"
}
daemon slurmctld slurmctld -D
daemon n1 slurmd -D -N n1
daemon n2 slurmd -D -N n2
idle() { [ "$(sinfo -h -o %T 2>/dev/null)" = idle ]; }
await 30 "Slurm does not start: $(tail -n 1 "$scratch/slurmctld.log")" idle
say "$(slurmctld -V): two nodes are up"

input="--text calib-data/text.txt --max-tokens 32K --uuid-tokens 6K --seq-len 2048 --wrope-position 1024"
export KVSMITH="$kvsmith" MODEL=calib-data/model INPUT="$input" WORK="$work" SHARDS=8 LAYER_TASKS=4
export TOKENS_SBATCH=--cpus-per-task=1 LAYERS_SBATCH=--cpus-per-task=1 JOIN_SBATCH=--cpus-per-task=2
script=scripts/cluster/slurm.sbatch

# The twin of token shard 2 goes first, so that both run at once.
twin=$(sbatch --parsable --job-name=kvsmith-twin --array=2 --output="$work/logs/twin.log" $TOKENS_SBATCH $script tokens)
sh $script >"$scratch/submit.log"
say "$(head -n 1 "$scratch/submit.log"); token shard 2 once more: $twin"
# shellcheck disable=SC2046
set -- $(head -n 1 "$scratch/submit.log" | tr -cd '0-9 ')
tokens=$1 layers=$2 join=$3

# pattern: waits for the task that writes such a file, and sets pid and node.
task() {
    writes() { pid=$(processes cmdline "$work/$1" | head -n 1) && [ -n "$pid" ]; }
    await 100 "no task writes $1" writes "$1"
    node=$(tr '\0' '\n' <"/proc/$pid/environ" | sed -n 's/^SLURMD_NODENAME=//p')
}

finished() { [ -z "$(squeue -h -o %i)" ]; }
states() { scontrol -o show job "$1" | sed 's/.* JobState=\([A-Z_]*\).*/\1/' | sort -u | paste -sd ' ' -; }
# A task is killed, a node is lost, a daemon is restarted.
trouble() {
    task tokens/1
    sleep 0.3
    kill -KILL "$pid" || fail "token shard 1 ended too soon to be killed"
    say "killed the task of token shard 1 on $node"

    task tokens/4
    sleep 0.3
    # As in a power cut, nothing may live to report the end of anything else.
    for signal in STOP STOP KILL; do
        # shellcheck disable=SC2046
        kill -$signal $(processes environ "SLURMD_NODENAME=$node")
    done
    say "lost $node while token shard 4 ran there"
    # A node that is back says what runs there. Slurm takes a task that is missing for lost if it began 12 s ago.
    sleep 13
    daemon "$node" slurmd -D -N "$node"
    say "$node is back"

    task "layers/.*-0.safetensors"
    if [ "$node" = n1 ]; then slurmd=$n1; else slurmd=$n2; fi
    kill "$slurmd"
    wait "$slurmd" || true
    sleep 1
    daemon "$node" slurmd -D -N "$node"
    say "restarted the daemon of $node while layer part 0 ran there"
}

# What met no trouble ran once.
check_attempts() {
    for log in tokens-1:2 tokens-4:2 layers-0:1 layers-1:1 layers-2:1 layers-3:1 join:1; do
        attempts=$(grep -c ', attempt ' "$work/logs/${log%:*}.log")
        [ "$attempts" = "${log#*:}" ] || fail "attempts of ${log%:*}: $attempts, not ${log#*:}"
    done
}

# Kills tasks until there were enough kills, or the jobs are done.
kill_tasks() {
    done=0
    : >"$scratch/kills.log"
    until [ $done = "$kills" ] || finished; do
        sleep "$(awk -v seed="$(od -An -N4 -tu4 /dev/urandom)" 'BEGIN { srand(seed); print 4 * rand() }')"
        pid=$(processes cmdline "$kvsmith" | shuf -n 1)
        [ -n "$pid" ] || continue
        name=$(tr '\0' '\n' <"/proc/$pid/environ" 2>/dev/null | sed -n 's/^SLURM_JOB_NAME=kvsmith-//p; s/^SLURM_ARRAY_TASK_ID=//p' |
            sort -r | paste -sd - -)
        if [ "$(grep -cx "$name" "$scratch/kills.log")" -lt 3 ] && kill -KILL "$pid" 2>/dev/null; then
            echo "$name" >>"$scratch/kills.log"
            done=$((done + 1))
            say "kill $done: $name"
        fi
    done
}

if [ "$kills" = 0 ]; then trouble; else kill_tasks; fi
await 300 "the jobs did not end" finished
for job in "$twin" "$tokens" "$layers" "$join"; do
    [ "$(states "$job")" = COMPLETED ] || fail "job $job: $(states "$job")"
done
[ "$kills" != 0 ] || check_attempts
say "every job is done"

# shellcheck disable=SC2086
"$kvsmith" calibrate --no-verdict --model $MODEL $input -o "$scratch/one.safetensors" 2>"$scratch/one.log"
say "the same calibration in one process is done"
cmp "$scratch/one.safetensors" "$work/packed.safetensors" || fail "the artifacts differ"
[ -s "$work/artifact.safetensors" ] || fail "there is no artifact with a verdict"
say "the artifacts are the same, byte for byte"
